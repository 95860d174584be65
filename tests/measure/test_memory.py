"""Memory samples and the memory tax."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from app.engines.lane import LaneMemory
from app.engines.scripted import ScriptedFleet, ScriptedOptions
from app.measure.memory import DeviceMemory, MemorySampler, memory_tax, read_gpu, read_ram


def lane_memory(**values: Any) -> LaneMemory:
    return LaneMemory(kind="ram", **values)


def test_the_tax_is_split_and_sums_up() -> None:
    base = lane_memory(process_bytes=1000, kv_tokens=50)
    spec = lane_memory(process_bytes=1300, draft_weights_bytes=100, draft_kv_bytes_per_token=3, kv_tokens=40)
    tax = memory_tax(base, spec)
    assert tax["total_bytes"] == 300
    assert tax["draft_kv_bytes"] == 120
    assert tax["rest_bytes"] == 80
    assert tax["lost_kv_tokens"] == 10


def test_an_unknown_stays_unknown() -> None:
    tax = memory_tax(lane_memory(), lane_memory(draft_weights_bytes=5))
    assert tax["total_bytes"] is None
    assert tax["rest_bytes"] is None
    assert tax["draft_weights_bytes"] == 5


def test_rest_is_what_is_neither_weights_nor_cache() -> None:
    assert lane_memory(process_bytes=100, target_weights_bytes=40, kv_allocated_bytes=30).rest_bytes == 30
    assert lane_memory(process_bytes=100).rest_bytes is None


def test_ram_is_the_machines() -> None:
    memory = read_ram()
    assert memory.total_bytes is not None
    assert memory.used_bytes is not None
    assert memory.free_bytes is not None
    assert 0 < memory.free_bytes <= memory.total_bytes
    assert memory.used_bytes + memory.free_bytes == memory.total_bytes


def test_no_gpu_gives_a_reason_and_no_zero() -> None:
    memory = read_gpu("GPU-00000000-0000-0000-0000-000000000000")
    assert memory.total_bytes is None
    assert memory.reason


def fake_nvml(memory_error: Exception | None) -> Any:
    class NVMLError(Exception):
        pass

    def memory_info(handle: object) -> Any:
        if memory_error is not None:
            raise NVMLError(memory_error)
        return SimpleNamespace(total=100, used=60, free=40)

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: b"A Card",
        nvmlDeviceGetMemoryInfo=memory_info,
    )


def test_a_gpu_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(None))
    assert read_gpu() == DeviceMemory("A Card", 100, 60, 40)


def test_a_query_that_is_not_supported_gives_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(ValueError("Not Supported")))
    memory = read_gpu()
    assert memory.name == "A Card"
    assert memory.used_bytes is None
    assert "Not Supported" in (memory.reason or "")


async def test_many_askers_cost_one_reading() -> None:
    fleet = ScriptedFleet(ScriptedOptions())
    await fleet.start()
    readings = []

    def read() -> DeviceMemory:
        readings.append(1)
        return DeviceMemory("test", 3, 2, 1)

    sampler = MemorySampler(fleet, read)
    first = await sampler.sample()
    assert await sampler.sample() is first
    assert len(readings) == 1
    assert set(first.lanes) == {"baseline", "speculative"}
    assert first.as_dict()["device"]["free_bytes"] == 1


async def test_lanes_that_are_not_ready_are_left_out() -> None:
    sampler = MemorySampler(ScriptedFleet(ScriptedOptions()), lambda: DeviceMemory("test"))
    assert (await sampler.sample()).lanes == {}
