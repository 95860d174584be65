"""The page around a run: start-up, failures, the form, the layout, what it must never do."""

# ruff: noqa: RUF001  (the page writes real multiplication signs)

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import FAST, Open, Site, wait_until

Start = Callable[..., Site]

CONTRAST = """selector => {
    const channel = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const parse = c => c.match(/[\\d.]+/g).map(Number);
    const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
    const ground = e => {
        for (; e; e = e.parentElement) {
            const c = parse(getComputedStyle(e).backgroundColor);
            if (c.length === 3 || c[3] === 1) return c;
        }
        return [255, 255, 255];
    };
    return [...document.querySelectorAll(selector)].filter(e => e.checkVisibility() && e.textContent.trim()).map(e => {
        const [a, b] = [luminance(parse(getComputedStyle(e).color)), luminance(ground(e))].sort((x, y) => y - x);
        return [e.textContent.trim().slice(0, 40), (a + 0.05) / (b + 0.05)];
    });
}"""


def finish_a_run(site: Site, mode: str = "together", **body: Any) -> None:
    site.post("/api/runs", {"prompt": "Describe a bridge.", "max_tokens": 40, "mode": mode, **body})
    site.wait_idle()


# ---- start-up and failure ----


def test_the_page_is_up_before_the_engines_and_shows_their_phases(start: Start, open_page: Open) -> None:
    site = start("baseline.start_s=4,speculative.start_s=1", wait_for="/livez")
    page = open_page(site)
    expect(page.locator(".lane-baseline .phases")).to_contain_text("read the script")
    expect(page.locator("#run")).to_be_disabled()
    first = page.locator(".lane-baseline .phases").inner_text()
    wait_until(lambda: page.locator(".lane-baseline .phases").inner_text() != first, "elapsed time to go on", 3)
    page.keyboard.press("Control+Enter")  # must not start anything yet
    expect(page.locator("#run")).to_be_enabled()
    expect(page.locator(".lane-baseline .lane-empty")).to_have_text("Ready")
    assert page.evaluate("window.specduel.stats.posts") == 0


def test_a_lane_that_failed_to_start_says_why_and_can_be_restarted(start: Start, open_page: Open) -> None:
    site = start("speculative.fail_start=1", wait_for="/livez")
    page = open_page(site)
    banner = page.locator(".lane-speculative .lane-banner")
    expect(banner).to_contain_text("the script says that this lane fails to start")
    expect(page.locator(".lane-baseline .lane-banner")).to_be_hidden()
    expect(page.locator("#run")).to_have_text("Run Baseline alone")
    page.locator("#run:enabled").click()
    page.locator("html:not(.is-active)").wait_for(state="attached")
    wait_until(lambda: bool(page.locator(".lane-baseline .text").text_content()), "the baseline's text", 10)
    site.wait_idle()
    assert list(site.last_record()["lanes"]) == ["baseline"]
    with page.expect_request("**/api/lanes/speculative/restart") as request:
        banner.get_by_role("button", name="Restart").click()
    assert request.value.method == "POST"


def test_a_long_prompt_of_another_run_does_not_widen_the_page(start: Start, open_page: Open) -> None:
    site = start("ttft_ms=2,step_ms=1")
    finish_a_run(site, prompt="Describe every bridge that you know of. " * 12)
    page = open_page(site)
    expect(page.locator(".request-strip")).to_be_visible()
    expect(page.locator(".request-strip")).to_contain_text("every bridge")
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_an_engine_that_dies_in_a_run_is_noticed_and_comes_back(start: Start, open_page: Open) -> None:
    site = start("ttft_ms=60,step_ms=15,speculative.die_at_step=5")
    page = open_page(site)
    page.locator("#run:enabled").click()
    banner = page.locator(".lane-speculative .lane-banner")
    expect(banner).to_contain_text("the script says that this engine dies")
    page.locator("html:not(.is-active)").wait_for(state="attached")
    record = site.last_record()
    assert page.locator(".lane-baseline .text").text_content() == record["lanes"]["baseline"]["text"]
    expect(page.locator("#verdict-note")).to_have_text("Speculative failed: no comparison.")
    expect(page.locator("#run")).to_have_text("Run Baseline alone")
    banner.get_by_role("button", name="Restart").click()
    expect(page.locator("#run")).to_be_enabled()


def test_a_lost_server_is_shown_and_its_return_noticed(start: Start, open_page: Open) -> None:
    site = start("ttft_ms=60,step_ms=50")
    page = open_page(site)
    open_page.watch.expected.append("ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED|ERR_CONNECTION_RESET|ERR_EMPTY")
    open_page.watch.expected.append("status of 404")  # a server that started anew doesn't know the run
    page.locator("#run:enabled").click()
    expect(page.locator(".lane-baseline .text")).to_contain_text("Write")
    site.process.kill()
    expect(page.locator("#badge-lost")).to_be_visible()
    written = page.locator(".lane-baseline .text").text_content()
    start("ttft_ms=60,step_ms=50", port=int(site.url.rpartition(":")[2]))
    expect(page.locator("#verdict-note")).to_have_text("The server no longer knows this run.", timeout=20_000)
    expect(page.locator("#badge-lost")).to_be_hidden()
    expect(page.locator("#run")).to_be_enabled()
    assert page.locator(".lane-baseline .text").text_content() == written
    assert page.evaluate("window.specduel.stats.posts") == 1


def test_a_buffering_proxy_is_pointed_out(fast: Site, open_page: Open) -> None:
    page = open_page(fast, go=False)
    events = "".join(f"event: check\ndata: {i}\n\n" for i in range(5))
    page.route("**/api/stream-check", lambda route: route.fulfill(body=events, content_type="text/event-stream"))
    page.goto(fast.url)
    expect(page.locator("#notice")).to_contain_text("Your proxy buffers streams")
    direct = open_page(fast)
    direct.wait_for_timeout(2500)
    expect(direct.locator("#notice")).to_be_hidden()


# ---- the form ----


def test_picking_a_prompt_fills_the_form(fast: Site, open_page: Open) -> None:
    page = open_page(fast)
    page.locator("#run:enabled").wait_for()
    prompts = {p["id"]: p for p in fast.get("/api/prompts")["prompts"]}
    structured = next(p for p in prompts.values() if p["json_schema"])
    page.locator("body").press("p")
    for group in {p["group"] for p in prompts.values()}:
        expect(page.locator(f"#group-{group}")).to_be_visible()
    assert page.locator(".card").count() == len(prompts) + 1
    page.locator(f'[data-pick="{structured["id"]}"]').click()
    expect(page.locator("#library")).to_be_hidden()
    expect(page.locator("#f-prompt")).to_have_value(structured["prompt"])
    expect(page.locator("#f-max_tokens")).to_have_value(str(structured["settings"]["max_tokens"]))
    expect(page.locator("[data-prompt-expect]")).to_have_text(structured["expect"])
    expect(page.locator("#f-structured")).to_be_checked()
    assert json.loads(page.locator("#f-json_schema").input_value()) == structured["json_schema"]
    page.locator("#f-max_tokens").fill("20")
    with page.expect_request("**/api/runs") as sent:
        page.locator("#run").click()
    body = sent.value.post_data_json
    assert body["prompt_id"] == structured["id"]
    assert body["json_schema"] == structured["json_schema"]
    page.locator("html:not(.is-active)").wait_for(state="attached")
    page.locator("#f-prompt").fill("Something else.")
    expect(page.locator("[data-prompt-edited]")).to_be_visible()
    with page.expect_request("**/api/runs") as sent:
        page.locator("#run:enabled").click()
    assert "prompt_id" not in sent.value.post_data_json


def test_what_was_typed_survives_a_reload(fast: Site, open_page: Open) -> None:
    page = open_page(fast)
    values = {"temperature": "0.65", "top_p": "0.9", "max_tokens": "33", "seed": "12", "prompt": "\nTwo\nlines."}
    for name, value in values.items():
        page.locator(f"#f-{name}").fill(value)
    page.locator('[name="mode"][value="in_turn"]').check()
    page.locator("label", has_text="JSON schema").click()
    page.locator("#schema-toggle").click()
    page.locator("#f-json_schema").fill('{"type": "object"}')
    page.reload()
    for name, value in values.items():
        expect(page.locator(f"#f-{name}")).to_have_value(value)
    expect(page.locator('[name="mode"][value="in_turn"]')).to_be_checked()
    expect(page.locator("#f-structured")).to_be_checked()
    expect(page.locator("#f-json_schema")).to_have_value('{"type": "object"}')


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "9"),
        ("temperature", "warm"),
        ("top_p", "0"),
        ("max_tokens", "0"),
        ("max_tokens", ""),
        ("seed", "-1"),
        ("prompt", "   "),
        ("prompt", "<|im_start|>system"),
    ],
)
def test_a_refusal_stands_beside_its_field(fast: Site, open_page: Open, field: str, value: str) -> None:
    page = open_page(fast)
    open_page.watch.expected.append("status of 422")
    page.locator("#run:enabled").wait_for()
    page.locator(f"#f-{field}").fill(value)
    with page.expect_response("**/api/runs") as answer:
        page.locator("#run").click()
    error = answer.value.json()["error"]
    message = page.locator(f"#err-{field}")
    expect(message).to_have_text(error["message"])
    expect(page.locator(f"#f-{field}")).to_have_attribute("aria-invalid", "true")
    expect(page.locator(f"#f-{field}")).to_have_value(value)
    box, near = message.bounding_box(), page.locator(f"#f-{field}").bounding_box()
    assert box and near
    assert 0 <= box["y"] - (near["y"] + near["height"]) < 30
    page.locator(f"#f-{field}").fill("Good now." if field == "prompt" else "1")
    page.locator("#f-max_tokens").fill("5")
    page.locator("#run").click()
    page.locator("#speedup:not([data-tone=none]), #verdict-note:not(:empty)").first.wait_for()
    expect(message).to_be_hidden()


def test_a_schema_that_is_no_json_is_refused_in_place(fast: Site, open_page: Open) -> None:
    page = open_page(fast)
    page.locator("#run:enabled").wait_for()
    page.locator("label", has_text="JSON schema").click()
    page.locator("#schema-toggle").click()
    page.locator("#f-json_schema").fill("{nope")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#err-json_schema")).to_contain_text("isn't valid JSON")
    assert page.evaluate("window.specduel.stats.posts") == 0


def test_definitions_are_reachable_by_keyboard(fast: Site, open_page: Open) -> None:
    page = open_page(fast)
    page.locator("#f-seed").focus()
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.dataset.term") == "acceptance_rate":
            break
    expect(page.locator("#tooltip")).to_contain_text("Σ accepted drafts ÷ Σ drafted tokens")
    page.keyboard.press("Escape")
    expect(page.locator("#tooltip")).to_be_hidden()


def test_the_settings_of_both_lanes_side_by_side(fast: Site, open_page: Open) -> None:
    page = open_page(fast)
    rows = fast.get("/api/state")["fairness"]["rows"]
    page.locator("#fairness").click()
    expect(page.locator("#settings tbody tr")).to_have_count(len(rows))
    page.locator("#settings [data-close]").click()
    expect(page.locator("#settings")).to_be_hidden()


# ---- how it looks ----


def test_scripted_is_unmistakable(fast: Site, open_page: Open) -> None:
    page = open_page(fast)
    expect(page.locator("#badge-source")).to_have_text("SCRIPTED, no model")
    marks = page.locator("#watermark span")
    expect(marks.first).to_have_text("SCRIPTED")
    assert marks.first.evaluate("e => parseFloat(getComputedStyle(e).fontSize)") > 200
    assert page.locator("#watermark").evaluate("e => getComputedStyle(e).pointerEvents") == "none"


def test_everything_of_a_run_fits_a_projector(fast: Site, open_page: Open) -> None:
    finish_a_run(fast, "in_turn")
    page = open_page(fast)
    expect(page.locator("#identity")).to_contain_text("faster")
    assert page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") >= 20
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
    assert page.evaluate(
        "document.querySelector('.verdict').scrollHeight <= document.querySelector('.verdict').clientHeight"
    )
    for selector in (
        ".lane-baseline",
        ".lane-speculative",
        ".verdict",
        "#output-verdict",
        ".charts",
        "#rate-chart canvas",
    ):
        box = page.locator(selector).bounding_box()
        assert box and box["x"] >= 0 and box["y"] >= 0
        assert box["x"] + box["width"] <= 1920 and box["y"] + box["height"] <= 1080
    left, right = (page.locator(f".lane-{lane}").bounding_box() for lane in ("baseline", "speculative"))
    assert left and right and (left["width"], left["height"]) == (right["width"], right["height"])
    small = page.evaluate(
        """() => [...document.querySelectorAll("body *")].filter(e => e.checkVisibility()
            && !e.closest(".out, .plot, .r") && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())
            && parseFloat(getComputedStyle(e).fontSize) < 17.9).map(e => e.textContent.trim())"""
    )
    assert small == []


@pytest.mark.parametrize("mode", ["together", "in_turn"])
def test_the_phone_watches_without_overflow(fast: Site, open_page: Open, mode: str) -> None:
    finish_a_run(fast, mode, prompt="A word of unusual length: " + "x" * 300)
    page = open_page(fast, 390, 844, has_touch=True)
    expect(page.locator(".lane-speculative .text")).to_contain_text("unusual length")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    clipped = page.evaluate(
        """() => [...document.querySelectorAll("body *")].filter(e => e.checkVisibility()
            && !e.closest(".watermark, .out, .visually-hidden, .plot")
            && e.getBoundingClientRect().right > 391).map(e => e.className)"""
    )
    assert clipped == []
    for control in ("#controls", "#run", "#fair"):
        expect(page.locator(control)).to_be_hidden()
    expect(page.locator("#speedup")).to_be_in_viewport()


@pytest.mark.parametrize(("width", "height"), [(1920, 1080), (1366, 768), (390, 844)])
def test_contrast(fast: Site, open_page: Open, width: int, height: int) -> None:
    finish_a_run(fast, "in_turn", temperature=0)
    page = open_page(fast, width, height)
    expect(page.locator("#identity")).to_contain_text("faster")
    found = page.evaluate(
        CONTRAST,
        "h1, h2, h3, p, dt, dd, label, .button, .text, .d, .badge, .key, b, .memory-name, .memory-total, figcaption",
    )
    assert len(found) > 40
    assert [item for item in found if item[1] < 7] == []


def test_an_inline_script_would_be_refused_and_noticed(fast: Site, open_page: Open) -> None:
    page = open_page(fast)
    page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "window.ranInline = true";
        document.body.append(script);
    }""")
    assert page.evaluate("window.ranInline") is None
    wait_until(lambda: open_page.watch.unexpected, "the violation to be seen by the watch")
    open_page.watch.expected.append("Content Security Policy")


# ---- modules by themselves ----


def module(page: Page, name: str, body: str, argument: Any = None) -> Any:
    """Run ``body`` with ``m``, a module of the page, and ``a``, the argument."""
    return page.evaluate(f"async a => {{ const m = await import('/static/js/{name}'); {body} }}", argument)


@pytest.fixture
def blank(fast: Site, open_page: Open) -> Page:
    return open_page(fast)


def test_think_blocks_are_told_apart_wherever_the_deltas_split(blank: Page) -> None:
    source = "Hm <b> <think>first</think>then <thin> and <think>more"
    result = module(
        blank,
        "think.js",
        """const seen = new Set();
        for (let i = 0; i <= a.length; i += 1) for (let j = i; j <= a.length; j += 1) {
            const splitter = new m.ThinkSplitter();
            const deltas = [a.slice(0, i), a.slice(i, j), a.slice(j)];
            const out = deltas.flatMap(text => splitter.feed([{ text, mark: null }]));
            out.push(...splitter.flush());
            const kinds = [["", false]];
            for (const f of out) {
                if (kinds.at(-1)[1] !== f.think) kinds.push(["", f.think]);
                kinds.at(-1)[0] += f.text;
            }
            seen.add(JSON.stringify(kinds.filter(k => k[0] !== "")));
        }
        return [...seen];""",
        source,
    )
    assert [json.loads(kinds) for kinds in result] == [
        [["Hm <b> ", False], ["first", True], ["then <thin> and ", False], ["more", True]]
    ]


def test_a_think_block_stands_apart_in_the_pane(blank: Page) -> None:
    shown = module(
        blank,
        "pane.js",
        """let writes = 0;
        const pane = new m.TokenPane(document.querySelector(".lane-baseline"), () => { writes += 1; });
        for (const text of ["<th", "ink>let me", " see</thi", "nk>\\nThe answer"]) {
            pane.push({ ids: [1], text, accepted: 0, drafted: 0 });
            pane.flush();
        }
        const details = document.querySelector(".lane-baseline details");
        return [details.open, details.querySelector("div").textContent, pane.main.lastChild.textContent, writes];""",
    )
    assert shown == [False, "let me see", "\nThe answer", 3]


def test_a_step_without_pieces_is_marked_as_a_whole(blank: Page) -> None:
    step = {"ids": [1, 2, 3], "text": "one two three", "accepted": 2, "drafted": 4}
    fragments = module(blank, "pane.js", "return m.fragmentsOf(a)", step)
    assert fragments == [{"text": "one two three", "mark": "s"}, {"text": "", "mark": "r", "n": "+2 −2"}]
    fragments = module(blank, "pane.js", "return m.fragmentsOf(a)", {**step, "pieces": ["one", " two", " three"]})
    assert [(f["text"], f["mark"]) for f in fragments] == [("one", "d"), (" two", "d"), (" three", None), ("", "r")]


def test_a_long_output_stays_whole_and_light(blank: Page) -> None:
    result = module(
        blank,
        "pane.js",
        """const pane = new m.TokenPane(document.querySelector(".lane-speculative"), () => {});
        let text = "";
        for (let i = 0; i < 20000; i += 1) {
            const pieces = [`w${i} `, i % 20 ? "x " : "\\n"];
            text += pieces.join("");
            pane.push({ ids: [1, 2], text: pieces.join(""), accepted: 1, drafted: 3, pieces });
            if (i % 50 === 0) pane.flush();
        }
        pane.flush();
        const walker = document.createTreeWalker(pane.main, NodeFilter.SHOW_ALL);
        let nodes = 0;
        while (walker.nextNode()) nodes += 1;
        return [pane.main.textContent === text, nodes];""",
    )
    assert result[0]
    assert result[1] < 15_000


def test_late_and_doubled_events_are_dropped(blank: Page) -> None:
    taken = module(
        blank,
        "stream.js",
        """const real = window.EventSource;
        let source;
        window.EventSource = class extends EventTarget {
            constructor() { super(); source = this; this.readyState = 1; }
            close() { this.closed = true; }
        };
        const taken = [];
        new m.RunStream("r1", "/x", { onEvent: (t, d) => taken.push([t, d.n]), onLost() {}, onGone() {} });
        window.EventSource = real;
        const send = (seq, type, run_id, n) => source.dispatchEvent(
            new MessageEvent(type, { lastEventId: String(seq), data: JSON.stringify({ run_id, n }) }));
        send(1, "run", "r1", 1);
        send(2, "steps", "r0", 2);
        send(2, "steps", "r1", 3);
        send(2, "steps", "r1", 4);
        send(1, "run", "r1", 5);
        send(3, "end", "r1", 6);
        send(4, "steps", "r1", 7);
        return [taken, source.closed];""",
    )
    assert taken == [[["run", 1], ["steps", 3], ["end", 6]], True]


def test_a_ratio_is_never_rounded_across_one(blank: Page) -> None:
    values = [0.8, 0.996, 0.9999, 1, 1.004, 2.254, None]
    assert module(blank, "format.js", "return a.map(m.times)", values) == [
        "0.80×", "0.996×", "0.9999×", "1.00×", "1.004×", "2.25×", "—",
    ]  # fmt: skip
    assert module(blank, "format.js", "return a.map(m.direction)", values) == [
        "slower", "slower", "slower", "no difference", "faster", "faster", "",
    ]  # fmt: skip


def test_the_rate_curve_is_tokens_over_time(blank: Page) -> None:
    steps = [{"t_ms": 100 + 50 * i, "ids": [1] if i < 20 else [1, 2, 3]} for i in range(40)]
    series = module(blank, "run.js", "return m.rateSeries(a, [50, 600, 1050, 2000, 2100], 400)", steps)
    assert series[0] is None and series[4] is None
    assert series[1:4] == pytest.approx([20, 20, 60], rel=1e-6)


def test_unknown_memory_is_a_dash_with_its_reason(blank: Page) -> None:
    lane = {"kind": "vram", "process_bytes": None, "target_weights_bytes": 2**30, "draft_weights_bytes": 0,
            "kv_allocated_bytes": None, "kv_used_bytes": None, "rest_bytes": None,
            "reasons": {"process_bytes": "NVML doesn't tell on this device"}}  # fmt: skip
    device = {"name": "GPU", "total_bytes": None, "used_bytes": None, "free_bytes": None, "reason": "not supported"}
    memory = {"kind": "vram", "device": device, "lanes": {"baseline": lane}}
    row = module(
        blank,
        "charts.js",
        """const box = document.createElement("div"); const kind = document.createElement("span");
        new m.MemoryBars(box, kind).update(a);
        const [lane, device] = box.children;
        const total = row => row.querySelector(".memory-total").textContent;
        const label = lane.querySelector("[role=img]").getAttribute("aria-label");
        return [kind.textContent, total(lane), label, total(device)];""",
        memory,
    )
    assert row[0] == "VRAM"
    assert (row[1], row[3]) == ("—", "—")
    assert row[2] == (
        "Baseline: target weights 1.00 GiB, draft weights 0 B, process bytes: NVML doesn't tell on this device"
    )


def test_one_stream_a_run_and_no_request_a_token(servers: Callable[[str], Site], open_page: Open) -> None:
    """Beside the one stream, only the state poll: no request a token or an event."""
    site = servers(FAST)
    page = open_page(site)
    page.locator("#run:enabled").wait_for()
    page.wait_for_timeout(1200)
    seen: list[str] = []
    page.on("request", lambda r: seen.append(r.url.removeprefix(site.url)))
    page.locator("#f-max_tokens").fill("100")
    page.locator("#run").click()
    page.locator("html.is-active").wait_for(state="attached")
    page.locator("html:not(.is-active)").wait_for(state="attached")
    assert sum(url.endswith("/events") for url in seen) == 1
    assert sum(url == "/api/runs" for url in seen) == 1
    assert len([url for url in seen if url not in ("/api/state",)]) <= 3
