"""Memory: the device's, and each lane's share of it.

The device is the GPU where there is one (read through NVML; ``nvidia-smi`` shows the same figures), else
the machine's RAM (psutil; ``free -b`` shows the same). A figure that can't be read is None with a reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil

from app.engines.lane import Fleet, LaneMemory, LaneName

SAMPLE_AGE_S = 0.5
"""A sample younger than this is handed out again: any number of viewers cost one reading."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory in bytes. ``reason`` says why figures are None."""

    name: str
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    reason: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "total_bytes": self.total_bytes,
            "used_bytes": self.used_bytes,
            "free_bytes": self.free_bytes,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class MemorySample:
    """One reading. ``t_ms`` is on the process's monotonic clock."""

    t_ms: float
    kind: Literal["vram", "ram"]
    device: DeviceMemory
    lanes: Mapping[LaneName, LaneMemory] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "t_ms": round(self.t_ms, 3),
            "kind": self.kind,
            "device": self.device.as_dict(),
            "lanes": {name: memory.as_dict() for name, memory in self.lanes.items()},
        }


def read_ram() -> DeviceMemory:
    """The machine's RAM. ``used`` is what is not available to a new program without swapping."""
    memory = psutil.virtual_memory()
    return DeviceMemory("RAM", memory.total, memory.total - memory.available, memory.available)


def read_gpu(uuid: str | None = None) -> DeviceMemory:
    """A GPU's memory through NVML: by UUID, or the first one. Never raises; the reason stands in the result."""
    try:
        import pynvml
    except ImportError:
        return DeviceMemory("GPU", reason="the package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return DeviceMemory("GPU", reason=f"NVML does not start: {error}")
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid) if uuid else pynvml.nvmlDeviceGetHandleByIndex(0)
        name = pynvml.nvmlDeviceGetName(handle)
        name = name.decode() if isinstance(name, bytes) else str(name)
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        except pynvml.NVMLError as error:
            return DeviceMemory(name, reason=f"NVML does not tell this device's memory: {error}")
        return DeviceMemory(name, int(memory.total), int(memory.used), int(memory.free))
    except pynvml.NVMLError as error:
        return DeviceMemory("GPU", reason=f"NVML does not know the device: {error}")
    finally:
        pynvml.nvmlShutdown()


class MemorySampler:
    """Takes memory samples of a fleet, at most one every ``SAMPLE_AGE_S``."""

    def __init__(self, fleet: Fleet, read_device: Callable[[], DeviceMemory] | None = None) -> None:
        self._fleet = fleet
        self._kind: Literal["vram", "ram"] = "vram" if fleet.device.kind == "cuda" else "ram"
        self._read_device = read_device or (read_gpu if fleet.device.kind == "cuda" else read_ram)
        self._lock = asyncio.Lock()
        self.latest: MemorySample | None = None

    async def sample(self) -> MemorySample:
        """A sample no older than ``SAMPLE_AGE_S``."""
        async with self._lock:
            now_ms = 1000 * time.monotonic()
            if self.latest is not None and now_ms - self.latest.t_ms < 1000 * SAMPLE_AGE_S:
                return self.latest
            device = await asyncio.to_thread(self._read_device)
            lanes: dict[LaneName, LaneMemory] = {}
            for name, lane in self._fleet.lanes.items():
                if lane.state == "ready":
                    lanes[name] = await lane.memory()
            self.latest = MemorySample(now_ms, self._kind, device, lanes)
            return self.latest


def memory_tax(baseline: LaneMemory, speculative: LaneMemory) -> dict[str, Any]:
    """What the speculative lane holds beyond the baseline, in bytes, split.

    ``draft_kv_bytes`` is the draft's KV bytes a token times the tokens the lane's KV cache holds.
    ``lost_kv_tokens``: how many fewer tokens the speculative lane's KV cache holds.
    """
    total = _difference(speculative.process_bytes, baseline.process_bytes)
    draft_kv = None
    if speculative.draft_kv_bytes_per_token is not None and speculative.kv_tokens is not None:
        draft_kv = speculative.draft_kv_bytes_per_token * speculative.kv_tokens
    named = [speculative.draft_weights_bytes, draft_kv]
    return {
        "kind": speculative.kind,
        "total_bytes": total,
        "draft_weights_bytes": speculative.draft_weights_bytes,
        "draft_kv_bytes": draft_kv,
        "rest_bytes": None if total is None else total - sum(value or 0 for value in named),
        "lost_kv_tokens": _difference(baseline.kv_tokens, speculative.kv_tokens),
    }


def _difference(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left - right
