"""``specduel doctor``: would the demo start here? Each line is fine, or says what to do.

The checks are the ones that starting the server makes, without starting an engine.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from app.bootstrap import MIN_PYTHON, OPTIONAL_MODULES, find_chromium
from app.engines import boot
from app.engines.machine import Machine, cpu_build, detect, find_gpus, nvml_handle
from app.engines.plan import LaneSpec, plan
from app.engines.preflight import available_bytes, needed_bytes
from app.errors import PairError, SpecduelError
from app.pairs import cache, catalogue, hub, resolve
from app.pairs.pair import Pair, ResolvedPair
from app.settings import Settings

Status = Literal["ok", "note", "fail"]

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``note``: the demo starts nevertheless."""

    status: Status
    subject: str
    detail: str


def run(settings: Settings, *, write: Callable[[str], object] = print) -> int:
    """Check this machine for what ``settings`` ask for; returns 1 if the demo would not start, else 0."""
    failed = 0
    for finding in examine(settings):
        failed += finding.status == "fail"
        write(f"{finding.status:>4}  {finding.subject:<9} {finding.detail}")
    if failed:
        write(f"\nThe demo would not start here: {failed} thing{'s' if failed > 1 else ''} to mend.")
    else:
        write("\nThe demo can start here.")
    return 1 if failed else 0


def examine(settings: Settings, machine: Machine | None = None) -> Iterator[Finding]:
    """The findings, in the order in which a start would meet them."""
    yield check_python()
    if settings.pair == "scripted":
        yield check_port(settings.host, settings.port)
        return
    yield check_vllm()
    yield check_torch()
    machine = machine or detect()
    yield check_device(machine)
    cache_dir = settings.cache_dir or cache.cache_dir()
    try:
        pair = catalogue.override(
            catalogue.load(settings.pair or catalogue.default_name(machine.kind)),
            method=settings.method,
            num_speculative_tokens=settings.num_speculative_tokens,
        )
        yield Finding("ok", "pair", f"{pair.name}: {pair.title} ({pair.method}, k = {pair.num_speculative_tokens})")
        resolved = resolve.resolve(pair, cache_dir=cache_dir, device=machine.kind)
        lanes = plan(resolved, machine)
    except SpecduelError as error:
        yield Finding("fail", "models" if isinstance(error, PairError) else "plan", error.message)
    else:
        yield from check_models(resolved)
        yield check_memory(lanes, machine)
        yield from check_disk(pair, resolved)
    yield check_port(settings.host, settings.port)
    yield check_chromium()


def check_python() -> Finding:
    version = platform.python_version()
    if sys.version_info < MIN_PYTHON:
        return Finding("fail", "python", f"{version}; 3.11 or newer is needed. Run `make setup` with a newer Python.")
    return Finding("ok", "python", f"{version} ({sys.prefix})")


def check_vllm() -> Finding:
    try:
        boot.check_version()
    except SpecduelError as error:
        return Finding("fail", "vllm", error.message)
    return Finding("ok", "vllm", f"{boot.vllm_version()} ({'CPU' if cpu_build() else 'CUDA'} build)")


def check_torch() -> Finding:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Finding("fail", "torch", "not installed. Run `make setup`.")
    # Only there are they harmful where their builds don't match torch's; where absent they aren't missed.
    present = [name for name in OPTIONAL_MODULES if cpu_build() and find_spec(name) is not None]
    broken = [name for name in present if not importable(name)]
    if broken:
        return Finding(
            "fail",
            "torch",
            f"{version}, but {', '.join(broken)} can't be imported, which breaks transformers. "
            f"Run `{sys.executable} -m pip uninstall {' '.join(broken)}`.",
        )
    return Finding("ok", "torch", version)


def importable(name: str) -> bool:
    """Whether a module can be imported, asked of another process: a failing import leaves traces in this one."""
    import subprocess

    command = [sys.executable, "-c", f"import {name}"]
    return subprocess.run(command, capture_output=True, check=False, timeout=120).returncode == 0  # noqa: S603


def check_device(machine: Machine) -> Finding:
    if machine.kind == "cuda":
        return Finding("ok", "device", "; ".join(gpu_details(gpu.visible, gpu.name) for gpu in machine.gpus))
    detail = f"{machine.name}, engine threads on {len(machine.cores)} core{'s' if len(machine.cores) != 1 else ''}"
    if not cpu_build():
        return Finding(
            "fail",
            "device",
            "vLLM's CUDA build is installed, and no NVIDIA GPU can be used. Check the driver with nvidia-smi, or "
            "install the CPU build: `SPECDUEL_BUILD=cpu make setup`.",
        )
    if gpus := find_gpus():
        detail += f"; {gpus[0].name} is not used: for it, run `SPECDUEL_BUILD=gpu make setup`"
    if platform.machine() == "x86_64" and "avx2" not in cpu_flags():
        return Finding("fail", "device", f"{detail}; vLLM's CPU build needs AVX2, which this CPU doesn't have.")
    return Finding("ok", "device", detail)


def gpu_details(visible: str, name: str) -> str:
    """Name, compute capability and driver of a GPU; what NVML can't say is left out."""
    import pynvml

    parts = [name]
    try:
        pynvml.nvmlInit()
        try:
            handle = nvml_handle(pynvml, visible)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            parts += [f"compute capability {major}.{minor}", f"driver {pynvml.nvmlSystemGetDriverVersion()}"]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        parts.append(f"NVML: {error}")
    return ", ".join(parts)


def cpu_flags() -> frozenset[str]:
    """The CPU's features, as Linux names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def check_models(resolved: ResolvedPair) -> Iterator[Finding]:
    """Where the models are; a hub's that isn't here is vLLM's to fetch."""
    for role, place, size in (
        ("target", resolved.target, resolved.target_weights_bytes),
        ("draft", resolved.draft, resolved.draft_weights_bytes),
    ):
        if isinstance(place, Path):
            known = f", {size / 1e9:.2f} GB of weights" if size is not None else ""
            yield Finding("ok", role, f"{place}{known}")
        elif place is not None:
            yield Finding("note", role, f"{place} is fetched from the hub at the first start")


def check_memory(lanes: tuple[LaneSpec, LaneSpec], machine: Machine) -> Finding:
    """Compare what the engines will take with what is free: weights, KV cache, and the processes themselves."""
    free: dict[str | None, int | None] = {None: available_bytes()}
    if machine.kind == "cuda":
        free = {gpu.visible: gpu_free_bytes(gpu.visible) for gpu in machine.gpus}
    need: dict[str | None, int] = {}
    for lane in lanes:
        where = lane.gpu if machine.kind == "cuda" else None
        total = needed_bytes(lane)
        if total is None or where not in free:
            return Finding("note", "memory", "can't be planned before the models are here")
        need[where] = need.get(where, 0) + total
    lines, short = [], False
    for where, wanted in need.items():
        name = f"GPU {where}" if where is not None else "RAM"
        available = free[where]
        if available is None:
            lines.append(f"{name}: about {wanted / GIB:.1f} GiB needed; free memory can't be read")
            continue
        short = short or available < wanted
        lines.append(f"{name}: about {wanted / GIB:.1f} GiB needed, {available / GIB:.1f} GiB free")
    if short:
        remedy = "End other programs, or lower max_model_len under [engine] in a pair file of your own."
        return Finding("fail", "memory", f"{'; '.join(lines)}. {remedy}")
    return Finding("ok", "memory", "; ".join(lines))


def gpu_free_bytes(visible: str) -> int | None:
    """Free memory of a GPU; None where NVML can't tell."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetMemoryInfo(nvml_handle(pynvml, visible)).free)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def check_disk(pair: Pair, resolved: ResolvedPair) -> Iterator[Finding]:
    """Room for what is still to be fetched; nothing to say when all is here."""
    refs = ((pair.target, resolved.target), (pair.draft, resolved.draft))
    waiting = [ref.name for ref, place in refs if ref is not None and isinstance(place, str)]
    if waiting:
        folder = hub.cache_folder()
        free = shutil.disk_usage(_existing(folder)).free
        yield Finding("note", "disk", f"{free / 1e9:.0f} GB free in {folder}, for {', '.join(waiting)}")


def check_port(host: str, port: int) -> Finding:
    from app.cli import bind

    try:
        bind(host, port).close()
    except SpecduelError as error:
        return Finding("fail", "port", error.message)
    return Finding("ok", "port", f"{host} port {port} is free")


def check_chromium() -> Finding:
    found = find_chromium()
    if found is None:
        return Finding("note", "chromium", "not found; only the browser tests need it")
    return Finding("ok", "chromium", f"{found} (for the browser tests)")


def _existing(folder: Path) -> Path:
    """The nearest folder above (or at) a path that exists."""
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder
