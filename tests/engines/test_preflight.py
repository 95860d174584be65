"""The memory check before a start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from app.engines.plan import LaneSpec
from app.engines.preflight import ENGINE_BYTES, available_bytes, check_memory, needed_bytes
from app.errors import StartError


def a_spec(**changes: Any) -> LaneSpec:
    values: dict[str, Any] = {
        "name": "baseline",
        "model": "m",
        "kind": "cpu",
        "engine_args": {"kv_cache_memory_bytes": 200, "max_model_len": 8192},
        "target_weights_bytes": 1000,
        **changes,
    }
    return LaneSpec(**values)


def test_weights_draft_cache_and_the_engine_itself_are_counted() -> None:
    assert needed_bytes(a_spec()) == 1200 + ENGINE_BYTES["cpu"]
    assert needed_bytes(a_spec(draft_weights_bytes=50)) == 1250 + ENGINE_BYTES["cpu"]
    assert needed_bytes(a_spec(target_weights_bytes=None)) is None


def test_too_little_memory_is_refused_with_the_numbers() -> None:
    specs = [a_spec(), a_spec(name="speculative")]
    check_memory(specs, 2 * (ENGINE_BYTES["cpu"] + 1200))
    with pytest.raises(StartError, match=r"2\.8 GiB of RAM \(1\.4 \+ 1\.4\), and 0\.9 GiB are free.*8192"):
        check_memory(specs, 1_000_000_000)


def test_what_is_not_known_is_not_refused() -> None:
    check_memory([a_spec(target_weights_bytes=None)], 0)
    check_memory([a_spec(kind="cuda")], 0)


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    limit, usage = tmp_path / "memory.max", tmp_path / "memory.current"
    usage.write_text("400")
    limit.write_text("1000\n")
    assert available_bytes([(limit, usage)]) == 600
    limit.write_text("max\n")
    machine = psutil.virtual_memory().total
    assert 600 < available_bytes([(limit, usage)]) <= machine
    assert 600 < available_bytes([(tmp_path / "none", usage)]) <= machine
