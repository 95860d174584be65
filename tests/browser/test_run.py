"""A run, from the click to the frozen figures, in a real browser against a real server."""

# ruff: noqa: RUF001  (the page writes real multiplication signs)

from __future__ import annotations

import re
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import FAST, Open, Site, wait_until

LANES = ("baseline", "speculative")
FIGURES = (
    "decode_tok_s",
    "ttft_ms",
    "ttft_browser_ms",
    "acceptance_rate",
    "tokens_per_step",
    "output_tokens",
    "total_ms",
)


def fill(page: Page, prompt: str, max_tokens: int = 60) -> None:
    page.locator("#f-prompt").fill(prompt)
    page.locator("#f-max_tokens").fill(str(max_tokens))


def run(page: Page, prompt: str = "Count the boats in the harbour.", max_tokens: int = 60) -> None:
    """Start a run and wait until the page follows it."""
    fill(page, prompt, max_tokens)
    page.locator("#run:enabled").click()
    page.locator("html.is-active").wait_for(state="attached")


def in_turn(page: Page) -> None:
    page.locator('[name="mode"][value="in_turn"]').check()


def wait_end(page: Page) -> None:
    page.locator("html:not(.is-active)").wait_for(state="attached")


def text(page: Page, lane: str) -> str:
    return page.locator(f".lane-{lane} .text").text_content() or ""


def figures(page: Page, lane: str) -> dict[str, str]:
    pane = page.locator(f".lane-{lane}")
    return {key: pane.locator(f'[data-figure="{key}"]').text_content() or "" for key in FIGURES}


def stats(page: Page) -> dict[str, Any]:
    found: dict[str, Any] = page.evaluate("window.specduel.stats")
    return found


def test_both_panes_stream_before_the_end_and_show_the_records_text(fast: Site, open_page: Open) -> None:
    page = open_page(fast)
    run(page, max_tokens=300)
    for lane in LANES:
        expect(page.locator(f".lane-{lane} .text")).to_contain_text("Count")
    early = {lane: text(page, lane) for lane in LANES}
    expect(page.locator(".lane-baseline")).to_have_attribute("aria-busy", "true")
    assert page.locator("html.is-active").count() == 1
    wait_end(page)
    record = fast.last_record()
    assert record["status"] == "completed"
    for lane in LANES:
        final = record["lanes"][lane]["text"]
        assert text(page, lane) == final
        assert 0 < len(early[lane]) < len(final)
        assert final.startswith(early[lane])
        expect(page.locator(f".lane-{lane}")).to_have_attribute("aria-busy", "false")


def test_figures_are_the_records_and_stay(fast: Site, open_page: Open) -> None:
    page = open_page(fast)
    run(page)
    wait_end(page)
    shown = {lane: figures(page, lane) for lane in LANES}
    record = fast.last_record()
    for lane in LANES:
        metrics = record["lanes"][lane]["metrics"]
        assert float(shown[lane]["decode_tok_s"]) == pytest.approx(metrics["decode_tok_s"], rel=0.006)
        assert shown[lane]["ttft_ms"] == f"{round(metrics['ttft_ms'])} ms"
        assert shown[lane]["tokens_per_step"] == f"{metrics['tokens_per_step']:.2f}"
        assert shown[lane]["output_tokens"] == "60"
        assert shown[lane]["total_ms"] == f"{metrics['total_ms'] / 1000:.2f} s"
        browser_ms = float(shown[lane]["ttft_browser_ms"].removesuffix(" ms"))
        assert browser_ms > metrics["ttft_ms"]
    assert shown["baseline"]["acceptance_rate"] == "—"
    rate = record["lanes"]["speculative"]["metrics"]["acceptance_rate"]
    assert shown["speculative"]["acceptance_rate"] == f"{round(100 * rate)} %"
    page.wait_for_timeout(700)
    assert {lane: figures(page, lane) for lane in LANES} == shown


def test_together_is_labelled_as_contended(fast: Site, open_page: Open) -> None:
    page = open_page(fast)
    run(page)
    wait_end(page)
    expect(page.locator("#contended")).to_have_text("sharing the device")
    expect(page.locator("#identity")).to_be_hidden()
    expect(page.locator("#fair")).to_be_visible()
    speedup = fast.last_record()["comparison"]["decode_speedup"]
    assert page.locator("#speedup").text_content() == f"{speedup:.2f}×"
    expect(page.locator("#output-verdict")).to_have_text("identical, 60 tokens")
    expect(page.locator("#announce")).to_contain_text("Run finished")


def test_accepted_drafts_are_marked_token_by_token(fast: Site, open_page: Open) -> None:
    page = open_page(fast)
    run(page)
    wait_end(page)
    steps = fast.last_record()["lanes"]["speculative"]["steps"]
    accepted = [piece for step in steps for piece in step["pieces"][: step["accepted"]] if piece]
    assert len(accepted) > 10
    pane = page.locator(".lane-speculative .text")
    assert pane.locator(".d").all_text_contents() == accepted
    rejected = [f"−{step['drafted'] - step['accepted']}" for step in steps if step["drafted"] > step["accepted"]]
    assert [mark.get_attribute("data-n") for mark in pane.locator(".r").all()] == rejected
    assert page.locator(".lane-baseline .d, .lane-baseline .r").count() == 0
    look = "e => { const s = getComputedStyle(e); return [s.color, s.backgroundImage] }"
    colour, underline = pane.locator(".d").first.evaluate(look)
    plain_colour, plain_underline = pane.evaluate(look)
    assert colour != plain_colour
    assert (underline.startswith("linear-gradient"), plain_underline) == (True, "none")
    page.locator("body").press("m")
    expect(page.locator("#marks")).not_to_be_checked()
    assert pane.locator(".d").first.evaluate(look) == [plain_colour, "none"]
    assert pane.locator(".r").first.evaluate("e => getComputedStyle(e, '::after').content") == "none"


def test_in_turn_shows_the_identity_and_plays_back_without_touching_figures(fast: Site, open_page: Open) -> None:
    page = open_page(fast)
    in_turn(page)
    run(page, max_tokens=300)
    expect(page.locator(".lane-speculative .lane-empty")).to_have_text("Waiting: Baseline runs first, alone")
    page.locator("html.is-playing").wait_for(state="attached")
    record = fast.last_record()
    comparison = record["comparison"]
    identity = " ".join((page.locator("#identity").inner_text()).split())
    yielded = record["lanes"]["speculative"]["metrics"]["tokens_per_step"]
    assert identity == (
        f"{yielded:.2f} tokens a step ÷ {comparison['step_cost_ratio']:.2f}× the cost "
        f"= {comparison['decode_speedup']:.2f}× faster"
    )
    expect(page.locator("#contended")).to_be_hidden()
    shown = {lane: figures(page, lane) for lane in LANES}
    final = record["lanes"]["baseline"]["text"]
    assert len(text(page, "baseline")) < len(final)
    page.locator("#skip").click()
    page.locator("html:not(.is-playing)").wait_for(state="attached")
    assert text(page, "baseline") == final
    assert text(page, "speculative") == record["lanes"]["speculative"]["text"]
    assert {lane: figures(page, lane) for lane in LANES} == shown
    page.locator("#replay").click()
    expect(page.locator("#playback-clock")).to_contain_text("Playing back")
    page.locator("html:not(.is-playing)").wait_for(state="attached")
    assert text(page, "baseline") == final


def test_reduced_motion_gets_no_playback_unasked(fast: Site, open_page: Open) -> None:
    page = open_page(fast, reduced_motion="reduce")
    in_turn(page)
    run(page)
    wait_end(page)
    expect(page.locator("#record")).to_be_visible()
    page.wait_for_timeout(500)
    assert page.locator("html.is-playing").count() == 0
    expect(page.locator("#replay")).to_be_visible()


def test_a_loss_is_red_and_in_words(servers: Callable[[str], Site], open_page: Open) -> None:
    site = servers("ttft_ms=60,step_ms=12,speculative.step_ms=30,speculative.acceptance=0.2,speculative.differ_at=20")
    page = open_page(site)
    in_turn(page)
    run(page)
    wait_end(page)
    speedup = site.last_record()["comparison"]["decode_speedup"]
    assert speedup < 1
    assert page.locator("#speedup").text_content() == f"{speedup:.2f}×"
    expect(page.locator("#speedup")).to_have_attribute("data-tone", "loss")
    expect(page.locator("#speedup-word")).to_have_text("slower")
    expect(page.locator("#cause")).to_have_text("A step costs more than it yields.")
    expect(page.locator("#output-verdict")).to_have_text("first difference at token 21")
    expect(page.locator("#output-detail")).to_contain_text('against " otherwise"')


def test_sampled_outputs_that_are_apart_are_warned_about(servers: Callable[[str], Site], open_page: Open) -> None:
    page = open_page(servers(FAST))
    page.locator("#f-temperature").fill("0.8")
    run(page)
    wait_end(page)
    expect(page.locator("#output-verdict")).to_have_text("consistent with the target")
    page.evaluate("""async () => {
        const { Verdict } = await import("/static/js/verdict.js");
        const { RunModel } = await import("/static/js/run.js");
        const run = new RunModel("made-up");
        Object.assign(run, { status: "completed", contended: false, comparison: {
            tokens: "not_comparable", mean_logprob: { baseline: -0.5, speculative: -6.1 }, consistent: false,
            consistency_note: "5.60 apart, more than sampling explains." } });
        new Verdict(document).finished(run);
    }""")
    expect(page.locator("#output-verdict")).to_have_text("not consistent with the target")
    expect(page.locator("#output-verdict")).to_have_attribute("data-tone", "warn")


@pytest.mark.parametrize("by", ["button", "escape"])
def test_stop(slow: Site, open_page: Open, by: str) -> None:
    page = open_page(slow)
    run(page, max_tokens=400)
    expect(page.locator(".lane-baseline .text")).to_contain_text("Count")
    if by == "button":
        page.locator("#stop").click()
    else:
        page.keyboard.press("Escape")
    wait_end(page)
    record = slow.last_record()
    assert record["status"] == "cancelled"
    expect(page.locator(".lane-baseline .lane-status")).to_have_text("Stopped")
    assert text(page, "baseline") == record["lanes"]["baseline"]["text"]
    expect(page.locator("#run")).to_be_enabled()


def test_keys(fast: Site, open_page: Open) -> None:
    page = open_page(fast)
    fill(page, "f? is no shortcut while typing.", 40)
    page.locator("#f-prompt").press("f")
    expect(page.locator("#help")).to_be_hidden()
    page.locator("#run:enabled").wait_for()
    page.locator("#f-prompt").press("Control+Enter")
    page.locator("html.is-active").wait_for(state="attached")
    wait_end(page)
    first = fast.last_record()
    assert first["mode"] == "together"
    page.locator("body").press("?")
    expect(page.locator("#help")).to_be_visible()
    expect(page.locator("#help")).to_contain_text("Σ accepted drafts ÷ Σ drafted tokens")
    page.keyboard.press("f")  # not behind a dialog
    page.keyboard.press("Escape")
    expect(page.locator("#help")).to_be_hidden()
    assert fast.last_record()["run_id"] == first["run_id"]
    page.locator("body").press("f")
    page.locator("html.is-active").wait_for(state="attached")
    wait_end(page)
    fair = fast.last_record()
    assert fair["mode"] == "in_turn"
    assert fair["request"]["messages"] == first["request"]["messages"]
    assert fair["request"]["max_tokens"] == 40
    expect(page.locator("#identity")).to_be_visible()
    assert stats(page)["posts"] == 2


def test_reload_during_a_run_resumes_and_generates_nothing_again(slow: Site, open_page: Open) -> None:
    page = open_page(slow)
    posts: list[str] = []
    page.on("request", lambda r: posts.append(r.url) if r.method == "POST" else None)
    run(page, max_tokens=100)
    expect(page.locator(".lane-baseline .text")).to_contain_text("Count the")
    run_id = slow.get("/api/state")["active_run"]["run_id"]
    page.reload(wait_until="load")
    expect(page.locator(".lane-baseline .text")).to_contain_text("Count the")
    assert slow.get("/api/state")["active_run"]["run_id"] == run_id
    wait_end(page)
    record = slow.last_record()
    assert (record["run_id"], record["status"]) == (run_id, "completed")
    for lane in LANES:
        assert text(page, lane) == record["lanes"][lane]["text"]
    assert len(posts) == 1
    assert stats(page)["posts"] == 0
    assert figures(page, "baseline")["ttft_browser_ms"] == "—"


def test_an_idle_page_follows_a_run_started_elsewhere(slow: Site, open_page: Open) -> None:
    page = open_page(slow, 390, 844)
    page.locator(".top").wait_for()
    slow.post("/api/runs", {"prompt": "Started on the stage.", "max_tokens": 60})
    expect(page.locator(".lane-baseline .text")).to_contain_text("Started on the stage")
    expect(page.locator("[data-strip-prompt]")).to_have_text("Started on the stage.")
    wait_end(page)
    assert text(page, "speculative") == slow.last_record()["lanes"]["speculative"]["text"]
    assert stats(page)["posts"] == 0
    assert stats(page)["streams"] == 1


def test_a_page_opened_after_a_run_shows_it(fast: Site, open_page: Open) -> None:
    fast.post("/api/runs", {"prompt": "Nobody watched this.", "max_tokens": 30, "mode": "in_turn"})
    fast.wait_idle()
    page = open_page(fast)
    expect(page.locator(".lane-speculative .text")).to_contain_text("Nobody watched this")
    expect(page.locator("#identity")).to_contain_text("faster")
    assert page.locator("html.is-playing").count() == 0
    assert stats(page)["posts"] == 0


def test_html_from_the_model_stays_text(fast: Site, open_page: Open) -> None:
    page = open_page(fast)
    page.evaluate("() => { window.broken = 0 }")
    attack = "<img src=x onerror=\"window.broken=1\"><script>window.broken=2</script><b onclick='x'>bold</b>"
    page.on("dialog", lambda dialog: pytest.fail("a dialog opened"))
    run(page, attack, max_tokens=150)
    wait_end(page)
    for lane in LANES:
        assert attack in text(page, lane)
        assert page.locator(f".lane-{lane} .out").locator("img, script, b").count() == 0
    expect(page.locator("[data-strip-prompt]")).to_have_text(attack)
    assert page.evaluate("window.broken") == 0


def test_a_thousand_tokens_a_second(servers: Callable[[str], Site], open_page: Open) -> None:
    """DOM writes stay at one a frame and lane, counted from outside the page's own code, and nothing lags."""
    site = servers("ttft_ms=30,step_ms=1,speculative.step_ms=3,speculative.pattern=3-2")
    page = open_page(site)
    page.evaluate("""() => {
        window.seen = { frames: 0, baseline: 0, speculative: 0 };
        const frame = () => { window.seen.frames += 1; requestAnimationFrame(frame); };
        requestAnimationFrame(frame);
        for (const lane of ["baseline", "speculative"]) {
            new MutationObserver(() => { window.seen[lane] += 1; }).observe(
                document.querySelector(`.lane-${lane} .out`), { childList: true, characterData: true, subtree: true });
        }
    }""")
    before, mine = page.evaluate("window.seen"), stats(page)
    run(page, max_tokens=2000)
    wait_end(page)
    after, mine_after = page.evaluate("window.seen"), stats(page)
    record = site.last_record()
    rates = {lane: record["lanes"][lane]["metrics"]["decode_tok_s"] for lane in LANES}
    assert min(rates.values()) > 400, rates
    for lane in LANES:
        assert text(page, lane) == record["lanes"][lane]["text"]
        writes = after[lane] - before[lane]
        assert 3 <= writes <= after["frames"] - before["frames"]
        assert mine_after["writes"][lane] - mine["writes"][lane] <= mine_after["frames"] - mine["frames"]


def test_the_page_ends_with_the_server(servers: Callable[[str], Site], open_page: Open) -> None:
    """Within 100 ms of the moment at which a plain SSE client on this machine has the end.

    The best of up to six runs: a lag of the page's own shows in all of them, a busy machine's in some.
    """
    site = servers("ttft_ms=30,step_ms=1,speculative.step_ms=3,speculative.pattern=3-2")
    page = open_page(site, 1366, 768)
    lags: list[float] = []
    while len(lags) < 6 and min(lags, default=100) >= 100:
        with page.expect_response("**/api/runs") as started:
            run(page, max_tokens=400)
        url = site.url + started.value.json()["events_url"]
        ends: list[float] = []
        listener = threading.Thread(target=lambda u=url, e=ends: e.append(end_of(u)))
        listener.start()
        wait_end(page)
        listener.join(timeout=20)
        lags.append(stats(page)["endedAt"] - 1000 * ends[0])
    assert min(lags) < 100, lags


def end_of(url: str) -> float:
    with urllib.request.urlopen(url, timeout=30) as stream:  # noqa: S310  (loopback)
        for line in stream:
            if line.startswith(b"event: end"):
                return time.time()
    raise AssertionError("the stream had no end event")


def test_the_reader_may_scroll_up(slow: Site, open_page: Open) -> None:
    page = open_page(slow, 1366, 768)
    run(page, "A line.\n" * 40, max_tokens=150)
    out = page.locator(".lane-speculative .out")
    wait_until(lambda: out.evaluate("e => e.scrollTop > 50"), "the pane to follow the end")
    out.evaluate("e => { e.scrollTop = 0 }")
    expect(page.locator(".lane-speculative .follow")).to_be_visible()
    length = len(text(page, "speculative"))
    wait_until(lambda: len(text(page, "speculative")) > length + 20, "more text")
    assert out.evaluate("e => e.scrollTop") == 0
    page.locator(".lane-speculative .follow").click()
    assert out.evaluate("e => e.scrollHeight - e.clientHeight - e.scrollTop") < 48
    page.keyboard.press("Escape")
    wait_end(page)


def test_copy_and_record(fast: Site, open_page: Open) -> None:
    page = open_page(fast, permissions=["clipboard-read", "clipboard-write"])
    run(page)
    wait_end(page)
    page.locator('[data-copy="speculative"]').click()
    expect(page.locator('[data-copy="speculative"]')).to_have_text("Copied")
    record = fast.last_record()
    assert page.evaluate("navigator.clipboard.readText()") == record["lanes"]["speculative"]["text"]
    assert re.fullmatch(f"/api/runs/{record['run_id']}", page.locator("#record").get_attribute("href") or "")
