"""The HTTP contract, over a socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.web.conftest import MakeSite, parse_events


async def test_a_run_from_post_to_record(make_site: MakeSite) -> None:
    site = await make_site()
    answer = await site.post(mode="in_turn")
    assert answer.status_code == 202
    reference = answer.json()
    assert reference["events_url"] == f"/api/runs/{reference['run_id']}/events"
    events = await site.events(reference["events_url"])
    assert [seq for seq, _, _ in events] == list(range(1, len(events) + 1))
    assert {data["run_id"] for _, _, data in events} == {reference["run_id"]}
    assert events[0][1] == "run"
    assert events[-1][1:] == ("end", {"run_id": reference["run_id"], "status": "completed"})
    record = (await site.client.get(f"/api/runs/{reference['run_id']}")).json()
    assert record["schema"] == "specduel-run/1"
    assert record["source"] == "scripted"
    assert set(record) == {
        "schema", "run_id", "created_at", "source", "status", "mode", "contended", "pair", "request", "versions",
        "lanes", "comparison",
    }  # fmt: skip
    for lane in record["lanes"].values():
        assert "".join(step["text"] for step in lane["steps"]) == lane["text"]
        assert sum(len(step["ids"]) for step in lane["steps"]) == lane["metrics"]["output_tokens"] == 30


async def test_the_stream_is_not_for_proxies_to_hold(make_site: MakeSite) -> None:
    site = await make_site()
    reference = (await site.post()).json()
    async with site.client.stream("GET", reference["events_url"]) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"
        assert "no-transform" in response.headers["cache-control"]
        assert "content-encoding" not in response.headers
        assert len(await anext(response.aiter_bytes())) > 2048


async def test_tokens_arrive_while_the_run_goes_on(make_site: MakeSite) -> None:
    site = await make_site("ttft_ms=10,step_ms=30")
    reference = (await site.post(max_tokens=40)).json()
    async with site.client.stream("GET", reference["events_url"]) as response:
        async for _, kind, _ in parse_events(response):
            if kind == "steps":
                assert site.duel.races.active is not None
                break
        else:
            raise AssertionError("no steps")


async def test_resuming_never_generates_again(make_site: MakeSite) -> None:
    site = await make_site()
    reference = (await site.post()).json()
    everything = await site.events(reference["events_url"])
    rest = await site.events(reference["events_url"], **{"Last-Event-ID": "7"})
    assert rest == everything[7:]
    assert await site.events(f"{reference['events_url']}?after={len(everything) - 1}") == everything[-1:]
    done = await site.client.get(reference["events_url"], headers={"Last-Event-ID": str(len(everything))})
    assert done.status_code == 204
    assert len(site.duel.races._runs) == 1


async def test_many_viewers_see_the_same(make_site: MakeSite) -> None:
    site = await make_site("ttft_ms=10,step_ms=5")
    reference = (await site.post()).json()
    first, second = await asyncio.gather(*(site.events(reference["events_url"]) for _ in range(2)))
    assert first == second


async def test_a_viewer_that_leaves_is_noticed_and_the_run_goes_on(make_site: MakeSite) -> None:
    site = await make_site("ttft_ms=5,step_ms=20")
    reference = (await site.post(max_tokens=60)).json()
    run = site.duel.races.get(reference["run_id"])
    async with site.client.stream("GET", reference["events_url"]) as response:
        await anext(parse_events(response))
        assert run.viewers == 1
    for _ in range(100):
        if run.viewers == 0:
            break
        await asyncio.sleep(0.02)
    assert run.viewers == 0
    assert run.status == "active"


async def test_cancel(make_site: MakeSite) -> None:
    site = await make_site("ttft_ms=5,step_ms=20")
    reference = (await site.post(max_tokens=4000)).json()
    await asyncio.sleep(0.1)
    answer = await site.client.delete(f"/api/runs/{reference['run_id']}")
    assert (answer.status_code, answer.json()["status"]) == (202, "cancelled")
    assert all(lane.unfinished == 0 for lane in site.fleet.lanes.values())
    assert (await site.client.delete(f"/api/runs/{reference['run_id']}")).status_code == 200
    assert (await site.events(reference["events_url"]))[-1][2]["status"] == "cancelled"
    assert (await site.post()).status_code == 202


async def test_a_second_run_is_refused_by_name(make_site: MakeSite) -> None:
    site = await make_site("step_ms=50")
    reference = (await site.post(max_tokens=100)).json()
    answer = await site.post()
    assert answer.status_code == 409
    assert answer.json()["error"]["type"] == "run_active"
    assert reference["run_id"] in answer.json()["error"]["message"]


async def test_before_the_lanes_are_ready(make_site: MakeSite) -> None:
    site = await make_site("start_s=30", ready=False)
    assert (await site.client.get("/livez")).status_code == 200
    assert (await site.client.get("/readyz")).status_code == 503
    answer = await site.post()
    assert answer.status_code == 503
    assert "baseline lane is" in answer.json()["error"]["message"]
    state = (await site.client.get("/api/state")).json()
    assert state["lanes"]["baseline"]["state"] == "starting"
    assert state["lanes"]["baseline"]["phases"][0]["done"] is False
    assert (await site.client.get("/")).status_code == 200


async def test_a_failed_lane_can_be_restarted(make_site: MakeSite) -> None:
    site = await make_site("ttft_ms=2,step_ms=2,speculative.die_at_step=2")
    await site.events((await site.post()).json()["events_url"])
    ready = await site.client.get("/readyz")
    assert ready.status_code == 503
    assert ready.json()["lanes"] == {"baseline": "ready", "speculative": "failed"}
    alone = await site.post(lanes=["baseline"])
    assert (await site.events(alone.json()["events_url"]))[-1][2]["status"] == "completed"
    assert (await site.client.post("/api/lanes/baseline/restart")).status_code == 409
    assert (await site.client.post("/api/lanes/other/restart")).status_code == 422
    assert (await site.client.post("/api/lanes/speculative/restart")).status_code == 202
    await site.ready()


async def test_a_lane_that_fails_to_start_says_why(make_site: MakeSite) -> None:
    site = await make_site("speculative.fail_start=true", ready=False)
    for _ in range(100):
        state = (await site.client.get("/api/state")).json()
        if state["lanes"]["speculative"]["state"] == "failed":
            break
        await asyncio.sleep(0.02)
    assert "script" in state["lanes"]["speculative"]["error"]
    assert state["lanes"]["baseline"]["state"] == "ready"
    assert state["ready"] is False


async def test_the_method_is_not_switched_during_a_run_nor_on_scripted_lanes(make_site: MakeSite) -> None:
    site = await make_site("ttft_ms=5,step_ms=30")
    url = "/api/lanes/speculative/method"
    refused = await site.client.post(url, json={"method": "ngram"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "method")
    assert (await site.client.post(url, json={"methd": "ngram"})).status_code == 422
    await site.post(max_tokens=100)
    busy = await site.client.post(url, json={"method": "ngram"})
    assert (busy.status_code, busy.json()["error"]["type"]) == (409, "run_active")


BAD: list[tuple[Any, str | None, str]] = [
    ({}, "prompt", "needs a prompt"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": "a\x00"}, "prompt", "NUL"),
    ({"prompt": "<|im_start|>system"}, "prompt", "chat template"),
    ({"prompt": 5}, "prompt", "valid string"),
    ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "messages", "not both"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "user"}]}, "messages", "content is missing"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "'system', 'user' or 'assistant'"),
    ({"prompt": "x", "mode": "race"}, "mode", "'together' or 'in_turn'"),
    ({"prompt": "x", "temperature": -0.1}, "temperature", "greater than or equal to 0"),
    ({"prompt": "x", "temperature": 2.1}, "temperature", "less than or equal to 2"),
    ({"prompt": "x", "temperature": "hot"}, "temperature", "valid number"),
    ({"prompt": "x", "top_p": 0}, "top_p", "greater than 0"),
    ({"prompt": "x", "top_p": 1.01}, "top_p", "less than or equal to 1"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"prompt": "x", "max_tokens": 10**9}, "max_tokens", "between 1 and 4096"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens", "valid integer"),
    ({"prompt": "word " * 5000, "max_tokens": 4000}, "max_tokens", "8192"),
    ({"prompt": "x" * 200_000}, "prompt", "characters"),
    ({"prompt": "x", "seed": -1}, "seed", "greater than or equal to 0"),
    ({"prompt": "x", "json_schema": {"type": "nothing"}}, "json_schema", "not a valid JSON schema"),
    ({"prompt": "x", "json_schema": []}, "json_schema", "dictionary"),
    ({"prompt_id": "no-such-prompt"}, "prompt_id", "no-such-prompt"),
    ({"prompt": "x", "temprature": 1}, "temprature", "temperature"),
    ({"prompt": "x", "lanes": ["fast"]}, "lanes", "'baseline' or 'speculative'"),
    ("just text", None, "object"),
]


@pytest.mark.parametrize(("body", "param", "says"), BAD)
async def test_bad_input_is_refused_with_what_is_allowed(
    make_site: MakeSite, body: Any, param: str | None, says: str
) -> None:
    site = await make_site()
    answer = await site.client.post("/api/runs", json=body)
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["type"] == "invalid_request"
    assert says in error["message"]
    assert error.get("param") == param
    assert (await site.post(max_tokens=2)).status_code == 202


@pytest.mark.parametrize(
    "body", [b"", b"[", b"\xff", b'{"prompt": "a\\ud800"}', b'{"prompt": "x", "temperature": NaN}', b"[" * 100_000]
)
async def test_broken_bodies(make_site: MakeSite, body: bytes) -> None:
    site = await make_site()
    answer = await site.client.post("/api/runs", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["error"]["message"]
    assert (await site.post(max_tokens=2)).status_code == 202


@pytest.mark.parametrize("chunked", [False, True])
async def test_ten_megabytes_are_refused(make_site: MakeSite, chunked: bool) -> None:
    site = await make_site()

    async def pieces() -> Any:
        for _ in range(100):
            yield b"a" * 100_000

    headers = {"content-type": "application/json"}
    answer = await site.client.post("/api/runs", content=pieces() if chunked else b"a" * 10_000_000, headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "body_too_large"
    assert (await site.post(max_tokens=2)).status_code == 202


async def test_unknown_runs(make_site: MakeSite) -> None:
    site = await make_site()
    for method, url in (("GET", "/api/runs/x"), ("GET", "/api/runs/x/events"), ("DELETE", "/api/runs/x")):
        answer = await site.client.request(method, url)
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found")


async def test_pages_of_other_origins_can_not_write(make_site: MakeSite) -> None:
    site = await make_site()
    foreign = await site.client.post("/api/runs", json={"prompt": "x"}, headers={"origin": "http://other.example"})
    assert (foreign.status_code, foreign.json()["error"]["type"]) == (403, "forbidden")
    own = {"origin": f"http://127.0.0.1:{site.port}"}
    assert (await site.client.post("/api/runs", json={"prompt": "x"}, headers=own)).status_code == 202


async def test_headers(make_site: MakeSite) -> None:
    site = await make_site()
    for url in ("/", "/api/state", "/static/api-docs.js", "/nowhere"):
        headers = (await site.client.get(url)).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


async def test_state_and_prompts(make_site: MakeSite) -> None:
    site = await make_site()
    state = (await site.client.get("/api/state")).json()
    assert state["ready"] is True
    assert state["source"] == "scripted"
    assert state["limits"]["context_tokens"] == 8192
    assert state["active_run"] is None
    assert state["memory"]["lanes"]["baseline"]["target_weights_bytes"] > 0
    prompts = (await site.client.get("/api/prompts")).json()["prompts"]
    assert len(prompts) >= 18
    by_id = await site.client.post("/api/runs", json={"prompt_id": prompts[0]["id"], "max_tokens": 3})
    assert by_id.status_code == 202
    record = (await site.client.get(f"/api/runs/{by_id.json()['run_id']}")).json()
    assert record["request"]["prompt_id"] == prompts[0]["id"]
    assert record["request"]["messages"][0]["content"] == prompts[0]["prompt"]


async def test_metrics_have_their_own_registry_and_say_scripted(make_site: MakeSite) -> None:
    site = await make_site()
    await site.events((await site.post(mode="in_turn")).json()["events_url"])
    answer = await site.client.get("/metrics")
    samples = [line for line in answer.text.splitlines() if line and not line.startswith("#")]
    assert samples
    assert all(line.startswith("specduel_") for line in samples)
    assert all('source="scripted"' in line for line in samples)
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in samples}
    assert values['specduel_output_tokens_total{lane="baseline",source="scripted"}'] == 30
    assert values['specduel_runs_total{mode="in_turn",source="scripted",status="completed"}'] == 1
    assert values['specduel_decode_speedup{mode="in_turn",source="scripted"}'] > 0
    drafted = values['specduel_drafted_tokens_total{lane="speculative",source="scripted"}']
    accepted = values['specduel_accepted_tokens_total{lane="speculative",source="scripted"}']
    assert 0 < accepted < drafted


async def test_two_apps_in_one_process_share_nothing(make_site: MakeSite) -> None:
    one, two = await make_site(), await make_site()
    await one.events((await one.post()).json()["events_url"])
    assert one.duel.races.last is not None
    assert two.duel.races.last is None
    assert "specduel_output_tokens_total{" not in (await two.client.get("/metrics")).text


async def test_the_stream_check_spreads_its_events(make_site: MakeSite) -> None:
    site = await make_site()
    loop, times = asyncio.get_running_loop(), []
    async with site.client.stream("GET", "/api/stream-check") as response:
        async for line in response.aiter_lines():
            if line.startswith("event: check"):
                times.append(loop.time())
    assert len(times) == 5
    assert times[-1] - times[0] > 0.5


async def test_openapi_is_complete_and_docs_need_no_internet(make_site: MakeSite) -> None:
    site = await make_site()
    schema = (await site.client.get("/openapi.json")).json()
    assert {"/api/runs", "/api/runs/{run_id}", "/api/runs/{run_id}/events", "/api/state", "/metrics"} <= set(
        schema["paths"]
    )
    page = (await site.client.get("/docs")).text
    assert "http" not in page.replace("HTTP API", "")
    for asset in ("swagger-ui.css", "swagger-ui-bundle.js"):
        assert (await site.client.get(f"/docs/assets/{asset}")).status_code == 200


async def test_the_documented_example_works(make_site: MakeSite) -> None:
    """The shell command of docs/http-api.md, as pasted but for the port."""
    from app import resources

    site = await make_site()
    text = (resources.prompts().parent / "docs" / "http-api.md").read_text()
    command = text.split("```sh\n")[1].split("```")[0].replace(":8000", f":{site.port}")
    process = await asyncio.create_subprocess_shell(command, stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0
    events = [line for line in output.decode().splitlines() if line.startswith("event: ")]
    assert events[0] == "event: run"
    assert events[-1] == "event: end"


async def test_shutdown_ends_streams_and_engines(make_site: MakeSite) -> None:
    site = await make_site("ttft_ms=5,step_ms=20")
    reference = (await site.post(max_tokens=4000)).json()
    async with site.client.stream("GET", reference["events_url"]) as response:
        events = parse_events(response)
        await anext(events)
        await site.duel.close()
        rest = [kind async for _, kind, _ in events]
    assert rest[-1] == "end"
    assert all(lane.state == "stopped" for lane in site.fleet.lanes.values())
    json.dumps(site.duel.state())
