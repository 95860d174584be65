"""The lane around an engine, with a stand-in for ``AsyncLLM`` that outputs what a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from app.engines import vllm_lane
from app.engines.lane import Finish, LaneRequest, Sampling, Step
from app.engines.plan import LaneSpec
from app.engines.vllm_lane import VllmLane
from app.errors import BadRequestError, EngineError

REQUEST = LaneRequest("r", (1, 2), Sampling(0.0, 1.0, 8, 0))


class Engine:
    """Outputs arrive when a test puts them; each comes with the iterations it is made of, as in vLLM."""

    def __init__(self, lane: VllmLane) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.aborted: list[str] = []
        self.closed = 0
        self.errored = False
        self.vllm_config = None
        self._lane = lane

    def put(self, ids: list[int], text: str, *passes: tuple[int, int, int], reason: str | None = None) -> None:
        """One output: ``passes`` are (tokens, accepted, drafted) of the iterations merged into it."""
        for tokens, accepted, drafted in passes:
            drafts = SimpleNamespace(num_accepted_tokens=accepted, num_draft_tokens=drafted) if drafted else None
            self._lane._recorder.record(
                SimpleNamespace(kv_cache_usage=0.1, spec_decoding_stats=drafts),
                SimpleNamespace(num_generation_tokens=tokens),
            )
        counts = [(accepted, drafted) for _, accepted, drafted in passes if drafted]
        metrics = SimpleNamespace(
            histogram=[len(counts)],
            per_step_accepted=[accepted for accepted, _ in counts],
            per_step_drafted=[drafted for _, drafted in counts],
        )
        completion = SimpleNamespace(
            token_ids=ids, text=text, finish_reason=reason, stop_reason=None, spec_decode_metrics=metrics
        )
        self.queue.put_nowait(SimpleNamespace(outputs=[completion]))

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        try:
            while True:
                output = await self.queue.get()
                if isinstance(output, Exception):
                    raise output
                yield output
                if output.outputs[0].finish_reason is not None:
                    return
        finally:
            self.closed += 1

    async def abort(self, ids: list[str]) -> None:
        self.aborted += ids
        for _ in ids:
            self.put([], "", reason="abort")

    def shutdown(self, timeout: float) -> None:
        pass


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> VllmLane:
    monkeypatch.setattr(vllm_lane, "sampling_params", lambda sampling: sampling)
    monkeypatch.setattr(vllm_lane, "tokens_prompt", lambda ids: list(ids))
    spec = LaneSpec("speculative", "m", "cpu", {"model": "m", "speculative_config": {"method": "ngram"}})
    made = VllmLane(spec)
    made._llm = Engine(made)
    made._state = "ready"
    return made


def engine(lane: VllmLane) -> Engine:
    found = lane._llm
    assert isinstance(found, Engine)
    return found


async def read(lane: VllmLane) -> list[Step | Finish]:
    async with aclosing(lane.generate(REQUEST)) as items:  # type: ignore[type-var]
        return [item async for item in items]


async def test_merged_outputs_become_the_steps_they_were(lane: VllmLane) -> None:
    reading = asyncio.create_task(read(lane))
    await asyncio.sleep(0)
    engine(lane).put([5, 6, 7, 8], "abcd", (1, 0, 0), (3, 2, 4), reason="length")
    *steps, finish = await reading
    assert [(s.ids, s.accepted, s.drafted) for s in steps if isinstance(s, Step)] == [((5,), 0, 0), ((6, 7, 8), 2, 4)]
    assert "".join(s.text for s in steps if isinstance(s, Step)) == "abcd"
    assert isinstance(finish, Finish)
    assert (finish.reason, finish.reconciled) == ("length", True)


async def test_a_last_output_without_tokens_ends_the_request(lane: VllmLane) -> None:
    reading = asyncio.create_task(read(lane))
    await asyncio.sleep(0)
    engine(lane).put([5], "a", (1, 0, 0))
    engine(lane).put([], "", reason="stop")
    step, finish = await reading
    assert isinstance(step, Step)
    assert isinstance(finish, Finish)
    assert finish.reason == "stop"


@pytest.mark.parametrize("leave", ["cancel", "close"])
async def test_leaving_closes_the_engines_stream(lane: VllmLane, leave: str) -> None:
    stream = lane.generate(REQUEST)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    if leave == "cancel":
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    else:
        engine(lane).put([5], "a", (1, 0, 0))
        await reading
        await stream.aclose()  # type: ignore[attr-defined]
    assert engine(lane).closed == 1
    assert lane._recorder.active == 0


async def test_stopping_ends_a_request_that_runs(lane: VllmLane) -> None:
    stand_in = engine(lane)
    reading = asyncio.create_task(read(lane))
    await asyncio.sleep(0)
    stand_in.put([5], "a", (1, 0, 0))
    await asyncio.sleep(0)
    await lane.stop()
    with pytest.raises(EngineError, match="abort"):
        await asyncio.wait_for(reading, 1)
    assert stand_in.aborted == ["r"]
    assert lane.state == "stopped"


class VLLMClientError(Exception):
    """Named like vLLM's base of errors that blame the request."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [(VLLMClientError("too long"), BadRequestError), (ValueError("no"), BadRequestError), (OSError("x"), EngineError)],
)
async def test_a_refused_request_leaves_the_lane_ready(
    lane: VllmLane, error: Exception, kind: Callable[..., Exception]
) -> None:
    engine(lane).queue.put_nowait(error)
    with pytest.raises(kind):  # type: ignore[arg-type]
        await read(lane)
    assert lane.state == "ready"


async def test_a_dead_engine_fails_the_lane_and_its_request(lane: VllmLane) -> None:
    stand_in = engine(lane)
    stand_in.errored = True
    stand_in.queue.put_nowait(RuntimeError("EngineCore encountered an issue."))
    with pytest.raises(EngineError, match="died"):
        await read(lane)
    assert lane.state == "failed"
    assert lane.error is not None
    with pytest.raises(EngineError, match="failed"):
        lane.generate(REQUEST)


async def test_an_idle_engine_that_dies_is_noticed(lane: VllmLane) -> None:
    changes: list[str] = []
    lane.on_change(lambda: changes.append(lane.state))
    watching = asyncio.create_task(lane._watch_engine())
    engine(lane).errored = True
    await asyncio.wait_for(watching, 2)
    assert changes == ["failed"]
    await lane.stop()
    assert lane.state == "stopped"
