"""One server's parts, put together: fleet, races, memory, metrics, prompts. What the routes talk to."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from fastapi.templating import Jinja2Templates

from app import __version__
from app.engines.fairness import fairness
from app.engines.lane import LANES, Fleet, LaneName
from app.errors import BadRequestError, PairError, RunActiveError, SpecduelError
from app.measure.memory import MemorySampler
from app.measure.prometheus import Prometheus
from app.pairs.pair import ResolvedPair
from app.pairs.speculation import ScriptedSpeculation, Speculation
from app.prompts import PromptLibrary
from app.race.race import Races
from app.settings import Settings

log = logging.getLogger(__name__)

IDLE_MEMORY_EVERY_S = 2.0
DEFAULT_CONTEXT_TOKENS = 2048
"""The context told until an engine tells its own."""

PROMPT_CHARS_PER_TOKEN = 12
"""No text makes a prompt longer than its context in tokens times this: longer ones aren't even tokenized."""


class Duel:
    """Everything one server holds. ``create_app`` builds it; two apps share nothing.

    Args:
        settings: the server's settings.
        fleet: both lanes.
        speculation: the pair, and the methods that it can use.
        library: the prompt library.
        templates: the page's templates.
    """

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        *,
        speculation: Speculation | ScriptedSpeculation,
        library: PromptLibrary,
        templates: Jinja2Templates,
    ) -> None:
        self.settings = settings
        self.fleet = fleet
        self.speculation = speculation
        self.library = library
        self.templates = templates
        self.sampler = MemorySampler(fleet)
        self.prometheus = Prometheus(fleet, self.sampler)
        self.races = Races(
            fleet,
            sample_memory=self.sampler.sample,
            observer=self.prometheus,
            pair=lambda: self.speculation.as_dict(),
            context_tokens=lambda: self.context_tokens,
            specduel_version=__version__,
            keep_runs=settings.keep_runs,
            abandon_after_s=settings.abandon_after_s or None,
            score_tokens=settings.score_limit_tokens,
            price_per_hour=settings.price_per_hour,
        )
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def prompts(self) -> list[dict[str, Any]]:
        """The library as ``GET /api/prompts`` gives it."""
        return [prompt.as_dict() for prompt in self.library]

    @property
    def context_tokens(self) -> int:
        """The smallest context of the engines that told theirs: prompt and output must fit it."""
        told = [lane.engine.get("context_tokens") for lane in self.fleet.lanes.values()]
        return min((tokens for tokens in told if tokens), default=DEFAULT_CONTEXT_TOKENS)

    @property
    def prompt_chars(self) -> int:
        return PROMPT_CHARS_PER_TOKEN * self.context_tokens

    @property
    def ready(self) -> bool:
        return all(lane.state == "ready" for lane in self.fleet.lanes.values())

    def lane_states(self) -> dict[str, str]:
        return {name: self.fleet.lanes[name].state for name in LANES}

    def state(self) -> dict[str, Any]:
        """``GET /api/state``."""
        sample = self.sampler.latest
        device = self.fleet.device
        active, last = self.races.active, self.races.last
        lanes = {}
        for name in LANES:
            lane = self.fleet.lanes[name]
            memory = sample.lanes.get(name) if sample else None
            lanes[name] = {
                "state": lane.state,
                "error": lane.error,
                "phases": [
                    {"name": phase.name, "elapsed_s": round(phase.elapsed_s, 1), "done": phase.done}
                    for phase in lane.phases
                ],
                "engine": dict(lane.engine),
                "memory": memory.as_dict() if memory else None,
            }
        rows = fairness(self.fleet.lanes["baseline"].engine, self.fleet.lanes["speculative"].engine)
        return {
            "version": __version__,
            "source": self.fleet.source,
            "pair": {**self.speculation.as_dict(), "methods": list(self.speculation.methods)},
            "device": {"kind": device.kind, "name": device.name, "shared": device.shared},
            "ready": self.ready,
            "lanes": lanes,
            "fairness": {"equal": not any(row["differs"] for row in rows), "rows": rows},
            "memory": sample.as_dict() if sample else None,
            "active_run": active.reference() if active else None,
            "last_run": last.reference() if last else None,
            "limits": {
                "context_tokens": self.context_tokens,
                "max_tokens": self.settings.max_tokens,
                "body_bytes": self.settings.body_limit_bytes,
                "prompt_chars": self.prompt_chars,
                "temperature": [0, 2],
                "top_p": [0, 1],
            },
        }

    def start(self) -> None:
        """Start the engines and the idle memory readings, in the background."""
        self._spawn(self._start_fleet(), "start the fleet")
        self._spawn(self._read_memory(), "read memory")

    def restart(self, name: LaneName) -> None:
        """Start a failed lane again, in the background."""
        self._spawn(self._restart(name), f"restart the {name} lane")

    async def switch(self, method: str | None, num_speculative_tokens: int | None) -> None:
        """Let the speculative lane speculate by another method; it starts again, in the background.

        Raises:
            RunActiveError: a run is active.
            BadRequestError: the method is unknown here, or its draft isn't there or doesn't fit.
        """
        if self.races.active is not None:
            raise RunActiveError(
                f"Run {self.races.active.run_id} is active; the speculative lane can be switched after it.",
                param=self.races.active.run_id,
            )
        if isinstance(self.speculation, ScriptedSpeculation):
            raise BadRequestError("Scripted lanes have no other method.", param="method")
        try:
            chosen = self.speculation.with_method(method, num_speculative_tokens)
            resolved = await asyncio.to_thread(chosen.resolve)
        except PairError as error:
            raise BadRequestError(error.message, param="method") from error
        self.speculation = chosen
        self._spawn(self._switch(resolved), f"switch to {chosen.pair.method}")

    async def close(self) -> None:
        """End everything: the active run, the engines, their processes."""
        await self.races.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.fleet.stop()

    def _spawn(self, coroutine: Any, name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_fleet(self) -> None:
        await self.fleet.start()
        for name, lane in self.fleet.lanes.items():
            if lane.state == "failed":
                log.error("the %s lane failed to start: %s", name, lane.error)
        if self.ready:
            await self.sampler.sample()
            log.info("both lanes are ready")

    async def _restart(self, name: LaneName) -> None:
        try:
            await self.fleet.restart(name)
        except SpecduelError as error:
            log.error("the %s lane failed to start again: %s", name, error.message)

    async def _switch(self, resolved: ResolvedPair) -> None:
        try:
            await self.fleet.switch(resolved)
        except SpecduelError as error:
            log.error("the speculative lane failed to start: %s", error.message)

    async def _read_memory(self) -> None:
        while True:
            await self.sampler.sample()
            await asyncio.sleep(IDLE_MEMORY_EVERY_S)
