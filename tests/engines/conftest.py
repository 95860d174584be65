"""Two real engines on the embedded pair, started once a session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import pytest_asyncio

from app.engines import boot
from app.engines.fleet import VllmFleet
from app.engines.lane import Finish, Lane, LaneRequest, Sampling, Step
from app.errors import PairError
from app.pairs import cache, catalogue, embedded
from app.pairs.resolve import resolve


@dataclass(frozen=True)
class Generation:
    """A finished generation."""

    prompt_ids: tuple[int, ...]
    live: list[Step]
    finish: Finish

    @property
    def steps(self) -> list[Step]:
        return list(self.finish.steps) if self.finish.steps is not None else self.live

    @property
    def ids(self) -> list[int]:
        return [token for step in self.steps for token in step.ids]

    @property
    def text(self) -> str:
        return "".join(step.text for step in self.steps)


async def generate(lane: Lane, prompt: str, **sampling: Any) -> Generation:
    """One generation to its end. Greedy, 32 tokens, unless told otherwise."""
    settings: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 32, "seed": 0}
    prompt_ids = lane.encode([{"role": "user", "content": prompt}])
    request = LaneRequest(f"{lane.name}-{hash(prompt)}", prompt_ids, Sampling(**(settings | sampling)))
    live: list[Step] = []
    finish: Finish | None = None
    async with aclosing(lane.generate(request)) as items:  # type: ignore[type-var]
        async for item in items:
            if isinstance(item, Finish):
                finish = item
            else:
                live.append(item)
    assert finish is not None
    return Generation(prompt_ids, live, finish)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fleet() -> AsyncIterator[VllmFleet]:
    """Both lanes of the embedded pair with n-gram speculation, ready. At the end no process may be left."""
    if boot.vllm_version() is None:
        pytest.skip("vLLM is not installed")
    folder = cache.cache_dir()
    try:
        embedded.build(folder, report=lambda line: None)
    except PairError as error:
        pytest.skip(error.message)
    pair = catalogue.override(catalogue.load("embedded"), method="ngram")
    engines = VllmFleet(resolve(pair, cache_dir=folder, device="cpu"))
    await engines.start()
    ids: set[int] = set()
    try:
        assert {lane.state for lane in engines.lanes.values()} == {"ready"}, [
            lane.error for lane in engines.lanes.values()
        ]
        yield engines
        for lane in engines.lanes.values():
            ids |= set(lane.process_ids)  # type: ignore[attr-defined]
    finally:
        await engines.stop()
    assert left(ids) == []


def left(ids: set[int]) -> list[str]:
    """Which of these processes still run."""
    alive: list[str] = []
    for number in ids:
        try:
            process = psutil.Process(number)
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(f"{number} {process.name()}")
        except psutil.NoSuchProcess:
            continue
    return alive


async def until(condition: Any, timeout_s: float) -> float:
    """Wait until ``condition()``; returns the seconds it took."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while not condition():
        assert loop.time() - start < timeout_s, f"not so after {timeout_s} s"
        await asyncio.sleep(0.02)
    return loop.time() - start
