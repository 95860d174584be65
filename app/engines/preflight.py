"""Is there memory for two engines? Told before anything loads, with the numbers and what would make it fit.

A start is refused for engines on the CPU; ``specduel doctor`` compares a GPU's figures too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from app.engines.plan import LaneSpec
from app.errors import StartError

ENGINE_BYTES: Mapping[str, int] = {"cpu": 1_500_000_000, "cuda": 2_000_000_000}
"""What an engine holds beside weights and KV cache (libraries, activations, graphs): measured with vLLM 0.32."""

GIB = 1 << 30
CGROUP_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def needed_bytes(spec: LaneSpec) -> int | None:
    """What one engine will hold of its device; None while its weights' size isn't known (not fetched yet)."""
    if spec.target_weights_bytes is None:
        return None
    kv_cache = int(spec.engine_args.get("kv_cache_memory_bytes") or 0)
    return spec.target_weights_bytes + (spec.draft_weights_bytes or 0) + kv_cache + ENGINE_BYTES[spec.kind]


def available_bytes(cgroup_files: Sequence[tuple[Path, Path]] = CGROUP_FILES) -> int:
    """RAM that can still be taken: what the machine has, or what a container's limit leaves."""
    free = int(psutil.virtual_memory().available)
    for limit_file, usage_file in cgroup_files:
        try:
            limit, usage = int(limit_file.read_text()), int(usage_file.read_text())
        except (OSError, ValueError):  # no such controller, or "max"
            continue
        free = min(free, max(0, limit - usage))
    return free


def check_memory(specs: Sequence[LaneSpec], free_bytes: int) -> None:
    """Refuse a start that can't fit.

    Raises:
        StartError: with what is needed, what there is, and what to change.
    """
    needs = [needed_bytes(spec) for spec in specs if spec.kind == "cpu"]
    if not needs or any(need is None for need in needs):
        return
    needed = sum(need for need in needs if need is not None)
    if needed <= free_bytes:
        return
    split = " + ".join(f"{(need or 0) / GIB:.1f}" for need in needs)
    context = specs[0].engine_args.get("max_model_len")
    raise StartError(
        f"Two engines need {needed / GIB:.1f} GiB of RAM ({split}), and {free_bytes / GIB:.1f} GiB are free. "
        f"Close other programs, set a shorter context (max_model_len, now {context}) in the pair's [engine], "
        "or use a smaller pair."
    )
