"""Races on scripted lanes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from app.engines.lane import LaneName, Step
from app.engines.scripted import ScriptedFleet, parse_options
from app.measure.memory import DeviceMemory, MemorySampler
from app.race.race import Races
from app.race.run import LaneRun, Run


class Heard:
    """An observer that remembers what it heard."""

    def __init__(self) -> None:
        self.steps: list[tuple[LaneName, Step]] = []
        self.ended: list[str] = []

    def step(self, lane: LaneName, step: Step, previous: Step | None) -> None:
        self.steps.append((lane, step))

    def lane_ended(self, name: LaneName, lane: LaneRun) -> None:
        self.ended.append(name)

    def run_ended(self, run: Run) -> None:
        self.ended.append(run.status)


class Track:
    """A started scripted fleet and its races."""

    def __init__(self, fleet: ScriptedFleet, heard: Heard, races: Races) -> None:
        self.fleet, self.heard, self.races = fleet, heard, races


MakeTrack = Callable[..., Awaitable[Track]]


@pytest.fixture
async def make_track() -> AsyncIterator[MakeTrack]:
    tracks: list[Track] = []

    async def make(options: str = "ttft_ms=5,step_ms=2", *, shared: bool = True, **settings: Any) -> Track:
        fleet = ScriptedFleet(parse_options(options), shared=shared)
        await fleet.start()
        heard = Heard()
        races = Races(
            fleet,
            sample_memory=MemorySampler(fleet, lambda: DeviceMemory("test")).sample,
            observer=heard,
            pair=lambda: {"name": "scripted"},
            context_tokens=lambda: 8192,
            specduel_version="test",
            **settings,
        )
        tracks.append(Track(fleet, heard, races))
        return tracks[-1]

    yield make
    for track in tracks:
        await track.races.close()
        await track.fleet.stop()
