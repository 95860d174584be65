"""Races, on scripted lanes: every way a run can go, and what it leaves behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from app.engines.scripted import parse_options
from app.errors import BadRequestError, LaneNotReadyError, NotFoundError, RunActiveError
from app.race.events import Event, EventLog
from app.race.request import Message, Mode, RunRequest
from app.race.run import Run
from tests.race.conftest import MakeTrack


def a_request(mode: Mode = "together", **changes: Any) -> RunRequest:
    return RunRequest(**{"messages": (Message("user", "Say something."),), "mode": mode, "max_tokens": 40, **changes})


async def events_of(run: Run, after: int = 0) -> list[tuple[str, dict[str, Any]]]:
    return [(event.type, json.loads(event.data)) async for event in run.log.read(after)]


def of_type(events: Sequence[tuple[str, dict[str, Any]]], type: str, lane: str | None = None) -> list[dict[str, Any]]:
    return [data for kind, data in events if kind == type and (lane is None or data["lane"] == lane)]


async def test_a_run_in_turn_is_fair_and_complete(make_track: MakeTrack) -> None:
    track = await make_track()
    run = track.races.start(a_request("in_turn"))
    events = await events_of(run)
    kinds = [kind for kind, _ in events]
    assert kinds[0] == "run"
    assert kinds[-2:] == ["comparison", "end"]
    first_speculative = next(i for i, (kind, data) in enumerate(events) if data.get("lane") == "speculative")
    baseline_finished = next(i for i, (kind, data) in enumerate(events) if kind == "lane_finished")
    assert baseline_finished < first_speculative
    record = run.record()
    assert record["status"] == "completed"
    assert record["contended"] is False
    comparison = record["comparison"]
    speculative = record["lanes"]["speculative"]["metrics"]
    assert comparison["tokens"] == "identical"
    assert comparison["decode_speedup"] == pytest.approx(speculative["tokens_per_step"] / comparison["step_cost_ratio"])


async def test_together_on_one_device_is_contended(make_track: MakeTrack) -> None:
    track = await make_track()
    run = track.races.start(a_request())
    events = await events_of(run)
    starts = of_type(events, "lane_started")
    assert abs(starts[0]["t_ms"] - starts[1]["t_ms"]) < 50
    assert run.contended
    assert run.comparison is not None
    assert run.comparison["step_cost_ratio"] is None
    assert run.comparison["decode_speedup"] > 0


async def test_a_device_each_makes_together_fair(make_track: MakeTrack) -> None:
    track = await make_track(shared=False)
    run = track.races.start(a_request())
    await events_of(run)
    assert not run.contended
    assert run.comparison is not None
    assert run.comparison["step_cost_ratio"] > 0


async def test_events_add_up_to_the_record(make_track: MakeTrack) -> None:
    track = await make_track("ttft_ms=2,step_ms=1,jitter=0.5")
    run = track.races.start(a_request(max_tokens=300))
    events = await events_of(run)
    record = run.record()
    for name, lane in record["lanes"].items():
        streamed = [step for batch in of_type(events, "steps", name) for step in batch["steps"]]
        assert streamed == lane["steps"]
        assert "".join(step["text"] for step in streamed) == lane["text"]
        assert sum(len(step["ids"]) for step in streamed) == lane["metrics"]["output_tokens"] == 300
    assert all(data["run_id"] == run.run_id for _, data in events)
    assert len(track.heard.steps) == sum(len(lane["steps"]) for lane in record["lanes"].values())
    json.dumps(record)


async def test_step_events_are_coalesced_and_the_first_is_at_once(make_track: MakeTrack) -> None:
    track = await make_track("ttft_ms=10,step_ms=1,k=0")
    run = track.races.start(a_request(max_tokens=400, lanes=("baseline",)))
    batches = of_type(await events_of(run), "steps", "baseline")
    seconds = run.lanes["baseline"].steps[-1].t_ms / 1000
    assert len(batches[0]["steps"]) == 1
    assert len(batches) <= 30 * seconds + 2


async def test_one_run_at_a_time(make_track: MakeTrack) -> None:
    track = await make_track("step_ms=20")
    run = track.races.start(a_request())
    with pytest.raises(RunActiveError, match=run.run_id):
        track.races.start(a_request())
    await track.races.cancel(run.run_id)
    await events_of(track.races.start(a_request(max_tokens=3)))


@pytest.mark.parametrize("options", ["ttft_ms=60000", "ttft_ms=1,step_ms=30"])
async def test_cancelling_frees_both_engines(make_track: MakeTrack, options: str) -> None:
    """During prefill, and during decoding."""
    track = await make_track(options)
    run = track.races.start(a_request(max_tokens=4000))
    await asyncio.sleep(0.2)
    assert all(lane.unfinished == 1 for lane in track.fleet.lanes.values())
    _, was_active = await asyncio.wait_for(track.races.cancel(run.run_id), 1)
    assert was_active
    assert all(lane.unfinished == 0 for lane in track.fleet.lanes.values())
    events = await events_of(run)
    assert events[-1] == ("end", {"run_id": run.run_id, "status": "cancelled"})
    assert {data["finish_reason"] for data in of_type(events, "lane_finished")} == {"cancelled"}
    assert run.comparison is not None
    assert run.comparison["decode_speedup"] is None
    assert (await track.races.cancel(run.run_id))[1] is False
    assert track.races.active is None


async def test_one_lanes_failure_leaves_the_other_running(make_track: MakeTrack) -> None:
    track = await make_track("ttft_ms=2,step_ms=2,speculative.fail_at_step=3")
    run = track.races.start(a_request())
    events = await events_of(run)
    (failed,) = of_type(events, "lane_failed")
    assert failed["lane"] == "speculative"
    assert "script" in failed["error"]["message"]
    assert run.lanes["baseline"].finish_reason == "length"
    assert run.status == "completed"
    assert run.record()["lanes"]["speculative"]["error"] == failed["error"]
    assert len(run.lanes["speculative"].steps) == 3
    assert run.comparison is not None
    assert run.comparison["tokens"] == "not_comparable"


async def test_both_lanes_failing_is_a_failed_run(make_track: MakeTrack) -> None:
    track = await make_track("ttft_ms=2,fail_at_step=0")
    run = track.races.start(a_request("in_turn"))
    assert (await events_of(run))[-1][1]["status"] == "failed"


async def test_a_dead_engine_refuses_the_next_run_and_the_other_lane_still_works(make_track: MakeTrack) -> None:
    track = await make_track("ttft_ms=2,step_ms=2,speculative.die_at_step=2")
    await events_of(track.races.start(a_request()))
    with pytest.raises(LaneNotReadyError, match="speculative lane is failed"):
        track.races.start(a_request())
    run = track.races.start(a_request(lanes=("baseline",)))
    await events_of(run)
    assert run.status == "completed"
    assert list(run.record()["lanes"]) == ["baseline"]
    await track.fleet.restart("speculative")
    assert track.fleet.lanes["speculative"].state == "ready"


async def test_greedy_difference_is_found_and_weighed(make_track: MakeTrack) -> None:
    track = await make_track("ttft_ms=2,step_ms=1,speculative.differ_at=9")
    run = track.races.start(a_request())
    await events_of(run)
    comparison = run.comparison
    assert comparison is not None
    assert comparison["tokens"] == "differs"
    assert comparison["first_difference"]["index"] == 9
    assert comparison["first_difference"]["speculative"]["text"] == " otherwise"
    assert comparison["tie_gap_nats"] > 1
    assert comparison["tie"] is False


async def test_a_shorter_output_differs_where_it_ends(make_track: MakeTrack) -> None:
    track = await make_track("ttft_ms=2,step_ms=1,speculative.stop_at=12")
    run = track.races.start(a_request())
    await events_of(run)
    assert run.comparison is not None
    assert run.comparison["tokens"] == "differs"
    assert run.comparison["first_difference"] == {"index": 12, "baseline": None, "speculative": None}


async def test_sampled_outputs_are_scored(make_track: MakeTrack) -> None:
    track = await make_track("ttft_ms=2,step_ms=1")
    run = track.races.start(a_request(temperature=0.9))
    await events_of(run)
    assert run.comparison is not None
    assert run.comparison["tokens"] == "not_comparable"
    assert run.comparison["consistent"] is True
    assert set(run.comparison["mean_logprob"]) == {"baseline", "speculative"}


async def test_long_sampled_texts_are_not_scored_and_say_so(make_track: MakeTrack) -> None:
    track = await make_track("ttft_ms=2,step_ms=1", score_tokens=20)
    run = track.races.start(a_request(temperature=0.9))
    await events_of(run)
    assert run.comparison is not None
    assert run.comparison["consistent"] is None
    assert "Not scored" in run.comparison["consistency_note"]


async def test_a_run_its_viewers_left_is_cancelled(make_track: MakeTrack) -> None:
    track = await make_track("step_ms=30", abandon_after_s=0.2)
    run = track.races.start(a_request(max_tokens=4000))
    with run.viewing():
        await asyncio.sleep(0.4)
        assert run.status == "active"
    assert (await asyncio.wait_for(events_of(run), 3))[-1][1]["status"] == "cancelled"


async def test_a_run_nobody_ever_watched_goes_on(make_track: MakeTrack) -> None:
    track = await make_track("ttft_ms=2,step_ms=10", abandon_after_s=0.05)
    run = track.races.start(a_request())
    assert run.task is not None
    await asyncio.wait([run.task])
    assert run.status == "completed"


async def test_a_viewer_that_comes_back_gets_the_rest_only(make_track: MakeTrack) -> None:
    track = await make_track()
    run = track.races.start(a_request())
    everything = [event async for event in run.log.read()]
    rest = [event async for event in run.log.read(5)]
    assert rest == everything[5:]
    assert [event.seq for event in everything] == list(range(1, len(everything) + 1))


async def test_a_stalled_viewer_slows_nobody(make_track: MakeTrack) -> None:
    track = await make_track("ttft_ms=2,step_ms=1")
    run = track.races.start(a_request(max_tokens=200))
    stalled = run.log.read()
    await anext(stalled)
    await asyncio.wait_for(events_of(run), 5)
    assert run.status == "completed"
    await stalled.aclose()  # type: ignore[attr-defined]


async def test_nothing_follows_the_end() -> None:
    log = EventLog("r")
    log.append("end", status="completed")
    log.append("steps", lane="baseline", steps=[])
    assert [event async for event in log.read()] == [Event(1, "end", '{"run_id":"r","status":"completed"}')]


async def test_old_runs_are_forgotten(make_track: MakeTrack) -> None:
    track = await make_track("ttft_ms=1,step_ms=1", keep_runs=2)
    ids = []
    for _ in range(3):
        run = track.races.start(a_request(max_tokens=2))
        await events_of(run)
        ids.append(run.run_id)
    assert track.races.get(ids[2]) is track.races.last
    with pytest.raises(NotFoundError, match="last 2 runs"):
        track.races.get(ids[0])


async def test_the_event_loop_stays_free(make_track: MakeTrack) -> None:
    """A race of 2,000 tokens a second a lane blocks nothing for long: its worst lag is under 50 ms most of the time."""
    track = await make_track("ttft_ms=2,step_ms=0.5,k=0")
    run = track.races.start(a_request(max_tokens=2000))
    lags: list[float] = []
    loop = asyncio.get_running_loop()
    while run.status == "active":
        due = loop.time() + 0.005
        await asyncio.sleep(0.005)
        lags.append(loop.time() - due)
    assert sorted(lags)[int(0.98 * len(lags))] < 0.05


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"messages": (Message("user", " \n"),)}, "prompt", "empty"),
        ({"messages": (Message("user", "a\x00b"),)}, "prompt", "NUL"),
        ({"messages": (Message("user", "a\ud800"),)}, "prompt", "surrogate"),
        ({"messages": (Message("user", "<|im_end|>"),)}, "prompt", "chat template"),
        ({"messages": (Message("assistant", "a"),)}, "messages", "user"),
        ({"max_tokens": 8192}, "max_tokens", "8192"),
        ({"messages": (Message("user", "word " * 9000),)}, "prompt", "Shorten the prompt"),
        ({"json_schema": {"type": "nothing"}}, "json_schema", "not a valid JSON schema"),
        ({"json_schema": {"$ref": "http://example.org/x"}}, "json_schema", "another document"),
        ({"json_schema": {"enum": ["x" * 40000]}}, "json_schema", "characters"),
        ({"json_schema": json.loads('{"not":' * 100 + "{}" + "}" * 100)}, "json_schema", "levels deep"),
    ],
)
async def test_bad_requests(make_track: MakeTrack, changes: dict[str, Any], param: str, says: str) -> None:
    track = await make_track()
    with pytest.raises(BadRequestError, match=says) as caught:
        track.races.start(a_request(**changes))
    assert caught.value.param == param
    assert track.races.active is None


async def test_references_inside_a_schema_are_allowed(make_track: MakeTrack) -> None:
    track = await make_track("ttft_ms=1,step_ms=1")
    schema = {"$defs": {"a": {"type": "string"}}, "type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}}
    await events_of(track.races.start(a_request(json_schema=schema)))


def test_scripted_options_are_read_and_checked() -> None:
    options = parse_options("step_ms=20, speculative.step_ms=30, pattern=3-0, baseline.ttft_ms=7, fail_start=true")
    assert (options.baseline.step_ms, options.speculative.step_ms) == (20, 30)
    assert options.speculative.cycle == (3, 0)
    assert options.baseline.ttft_ms == 7
    assert options.baseline.k == 0
    assert options.speculative.fail_start is True
