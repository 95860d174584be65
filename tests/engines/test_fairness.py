from __future__ import annotations

from typing import Any

from app.engines.fairness import fairness

SAME: dict[str, Any] = {"method": None, "dtype": "float32", "async_scheduling": True, "kv_tokens": 8704, "threads": 1}


def row(setting: str, speculative: dict[str, Any], baseline: dict[str, Any] = SAME) -> dict[str, Any]:
    (found,) = [row for row in fairness(baseline, baseline | speculative) if row["setting"] == setting]
    return found


def test_equal_engines_have_no_difference() -> None:
    assert not any(row["differs"] for row in fairness(SAME, SAME | {"method": "ngram", "num_speculative_tokens": 4}))


def test_the_speculation_itself_is_not_a_row() -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "rejection_sampler": "mended"}
    assert {row["setting"] for row in fairness(SAME, SAME | speculation)} == set(SAME) - {"method"}


def test_a_difference_shows_both_values() -> None:
    found = row("dtype", {"dtype": "bfloat16"})
    assert found == {
        "setting": "dtype",
        "baseline": "float32",
        "speculative": "bfloat16",
        "differs": True,
        "forced_by": None,
    }


def test_vllm_forces_async_scheduling_off_for_ngram_but_not_for_eagle() -> None:
    assert row("async_scheduling", {"method": "ngram", "async_scheduling": False})["forced_by"] == "vLLM"
    assert row("async_scheduling", {"method": "eagle3", "async_scheduling": False})["forced_by"] is None


def test_async_scheduling_off_in_the_baseline_is_somebodys_choice() -> None:
    off = SAME | {"async_scheduling": False}
    found = row("async_scheduling", {"method": "ngram", "async_scheduling": True}, off)
    assert (found["differs"], found["forced_by"]) == (True, None)


def test_caches_a_few_blocks_apart_are_equal() -> None:
    assert not row("kv_tokens", {"kv_tokens": 8672})["differs"]
    assert row("kv_tokens", {"kv_tokens": 4096})["differs"]


def test_nothing_is_compared_before_both_engines_are_known() -> None:
    assert fairness({}, SAME) == fairness(SAME, {}) == []
