"""Where an engine's bytes are. Blocks for some milliseconds: call it in a thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from app.engines import processes, resolved
from app.engines.lane import LaneMemory
from app.engines.machine import nvml_handle
from app.engines.plan import LaneSpec

NOT_UP = "the engine is not up"


def read(
    spec: LaneSpec, report: Mapping[str, Any], config: Any, cores: Sequence[processes.Core], usage: float | None
) -> LaneMemory:
    """Memory of one engine.

    Args:
        spec: for the checkpoint's bytes: on a CPU vLLM repacks most weights into buffers that can't be found again.
        report: bytes read in the worker.
        config: vLLM's configuration.
        cores: the engine's core processes.
        usage: the share of the KV cache in use, 0 to 1.
    """
    reasons: dict[str, str] = {}
    kind = "ram" if spec.kind == "cpu" else "vram"
    if not report:
        names = ("process_bytes", "target_weights_bytes", "draft_weights_bytes", "kv_allocated_bytes", "kv_used_bytes")
        return LaneMemory(kind, reasons=dict.fromkeys(names, NOT_UP))  # type: ignore[arg-type]
    if spec.kind == "cpu":
        process, target, draft = ram_bytes(cores), spec.target_weights_bytes, spec.draft_weights_bytes
    else:
        process, why = vram_bytes(spec.gpu, cores)
        if why is not None:
            reasons["process_bytes"] = why
        target, draft = report.get("target_weights_bytes"), report.get("draft_weights_bytes")
    if process is None:
        reasons.setdefault("process_bytes", "its processes can't be read")
    if target is None:
        reasons["target_weights_bytes"] = "the checkpoint's size is not known"
    if draft is None:
        if _drafts(spec):
            reasons["draft_weights_bytes"] = "its size is not known"
        else:
            draft = 0  # there is no draft model, and that is known
    allocated, draft_kv = report.get("kv_bytes"), report.get("draft_kv_bytes")
    tokens = resolved.kv_tokens(config)
    if allocated is None:
        reasons["kv_allocated_bytes"] = "this vLLM doesn't show its KV cache"
    used = int(allocated * usage) if allocated is not None and usage is not None else None
    if used is None:
        reasons["kv_used_bytes"] = "the engine has not reported it yet"
    return LaneMemory(
        kind,  # type: ignore[arg-type]
        process_bytes=process,
        target_weights_bytes=target,
        draft_weights_bytes=draft,
        kv_allocated_bytes=allocated,
        kv_used_bytes=used,
        kv_tokens=tokens,
        kv_bytes_per_token=_per_token(allocated, tokens),
        draft_kv_bytes_per_token=_per_token(draft_kv, tokens),
        reasons=reasons,
    )


def _drafts(spec: LaneSpec) -> bool:
    return (spec.engine_args.get("speculative_config") or {}).get("model") is not None


def _per_token(size: int | None, tokens: int | None) -> int | None:
    return round(size / tokens) if size is not None and tokens else None


def ram_bytes(cores: Sequence[processes.Core]) -> int | None:
    """Resident memory of an engine's processes. Pages they share with others count by their share (PSS, on Linux)."""
    total, found = 0, False
    for member in processes.tree(cores):
        try:
            total += _resident(member)
        except psutil.Error:
            continue
        found = True
    return total if found else None


def _resident(process: psutil.Process) -> int:
    try:
        full = process.memory_full_info()
    except psutil.AccessDenied:
        return int(process.memory_info().rss)
    return int(getattr(full, "pss", 0) or full.rss)


def vram_bytes(gpu: str | None, cores: Sequence[processes.Core]) -> tuple[int | None, str | None]:
    """Device memory of an engine's processes, or None and the reason.

    To check: ``nvidia-smi --query-compute-apps=pid,used_memory --format=csv``.
    """
    try:
        import pynvml
    except ImportError:
        return None, "the package nvidia-ml-py is not installed"
    ids = {member.pid for member in processes.tree(cores)}
    try:
        pynvml.nvmlInit()
        try:
            shown = pynvml.nvmlDeviceGetComputeRunningProcesses(nvml_handle(pynvml, gpu or "0"))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"
    own = [entry.usedGpuMemory for entry in shown if entry.pid in ids]
    if not own:
        return None, "NVML doesn't list the engine's processes (in a container it may see other process ids)"
    if any(size is None for size in own):
        return None, "this GPU doesn't tell memory by process"
    return sum(map(int, own)), None
