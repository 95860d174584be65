"""Both vLLM lanes: where they run, in which order they start, and how one is started again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal

from app.engines import boot
from app.engines.lane import Device, Lane, LaneName
from app.engines.machine import Machine, detect
from app.engines.plan import plan
from app.engines.preflight import available_bytes, check_memory
from app.engines.vllm_lane import VllmLane
from app.errors import EngineError
from app.pairs.pair import ResolvedPair

# vLLM's workers wait for the next request in a busy loop, and go to sleep after about a second without one.
SETTLE_S = 1.2


class VllmFleet:
    """The two lanes of a model pair; see :class:`app.engines.lane.Fleet`.

    Making one starts nothing. On one GPU the engines start one after the other, since each checks the memory that
    is free; elsewhere both at once.
    """

    def __init__(
        self,
        resolved: ResolvedPair,
        *,
        machine: Machine | None = None,
        log_dir: Path | None = None,
        engine_logs: bool = False,
    ) -> None:
        """
        Args:
            resolved: the pair, with its models on this machine.
            machine: where to run; None: this machine, as found.
            log_dir: see :class:`VllmLane`.
            engine_logs: leave vLLM's output on the terminal.

        Raises:
            PairError: the pair can't be planned.
            StartError: there is too little memory.
        """
        self._machine = machine or detect()
        self._log_dir, self._engine_logs = log_dir, engine_logs
        specs = plan(resolved, self._machine, engine_logs=engine_logs)
        check_memory(specs, available_bytes())
        self._lanes: dict[LaneName, VllmLane] = {
            spec.name: VllmLane(spec, log_dir=log_dir, engine_logs=engine_logs) for spec in specs
        }
        self._gate = asyncio.Lock()
        gpus = {spec.gpu for spec in specs}
        self._one_gpu = self._machine.kind == "cuda" and len(gpus) == 1
        # On a CPU the lanes have cores of their own, but the caches and the memory's bandwidth are one.
        self._device = Device(
            self._machine.kind, self._machine.name, shared=self._machine.kind == "cpu" or len(gpus) == 1
        )

    @property
    def lanes(self) -> Mapping[LaneName, Lane]:
        return self._lanes

    @property
    def device(self) -> Device:
        return self._device

    @property
    def source(self) -> Literal["live"]:
        return "live"

    @property
    def settle_s(self) -> float:
        return SETTLE_S

    @property
    def versions(self) -> Mapping[str, str | None]:
        torch: str | None = None
        with contextlib.suppress(metadata.PackageNotFoundError):
            torch = metadata.version("torch")
        gpu = self._machine.name if self._machine.kind == "cuda" else None
        return {"vllm": boot.vllm_version(), "torch": torch, "gpu": gpu}

    async def start(self) -> None:
        if self._one_gpu:
            for name in self._lanes:
                await self._start(name)
            return
        tasks = [asyncio.create_task(self._start(name)) for name in self._lanes]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self, name: LaneName) -> None:
        with contextlib.suppress(EngineError):  # the lane is failed, and says why
            if self._one_gpu:
                async with self._gate:
                    await self._lanes[name].start()
            else:
                await self._lanes[name].start()

    async def restart(self, name: LaneName) -> None:
        await self._lanes[name].stop()
        await self._start(name)

    async def switch(self, resolved: ResolvedPair) -> None:
        spec = next(
            spec for spec in plan(resolved, self._machine, engine_logs=self._engine_logs) if spec.name == "speculative"
        )
        before = self._lanes["speculative"]
        lane = VllmLane(spec, log_dir=self._log_dir, engine_logs=self._engine_logs)
        self._lanes["speculative"] = lane  # seen at once, waiting, while the other leaves
        await before.stop()
        await self._start("speculative")

    async def stop(self) -> None:
        await asyncio.gather(*(lane.stop() for lane in self._lanes.values()))
