"""Do the two engines differ in anything but the speculation? Then the comparison says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# What is being compared, and what only one lane has.
SUBJECT: Final = frozenset({"method", "num_speculative_tokens", "rejection_sampler"})
# Methods with drafts made on the CPU between two steps: vLLM then turns async scheduling off.
NO_ASYNC_SCHEDULING: Final = frozenset({"ngram", "suffix", "medusa", "draft_model"})
# The KV cache is allocated in blocks: budgets of equal tokens end up a few blocks apart.
KV_TOLERANCE: Final = 0.02


def fairness(baseline: Mapping[str, Any], speculative: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare the resolved settings of both lanes.

    Returns:
        One row a setting: ``{"setting", "baseline", "speculative", "differs", "forced_by"}``. ``forced_by`` is
        "vLLM" where the method leaves no choice, else None. No rows until both engines are known.
    """
    if not baseline or not speculative:
        return []
    method = speculative.get("method")
    rows: list[dict[str, Any]] = []
    for setting in [*baseline, *(name for name in speculative if name not in baseline)]:
        if setting in SUBJECT:
            continue
        left, right = baseline.get(setting), speculative.get(setting)
        differs = not _equal(setting, left, right)
        rows.append(
            {
                "setting": setting,
                "baseline": left,
                "speculative": right,
                "differs": differs,
                "forced_by": "vLLM" if differs and _forced(setting, left, right, method) else None,
            }
        )
    return rows


def _equal(setting: str, left: Any, right: Any) -> bool:
    if setting == "kv_tokens" and left and right:
        return bool(abs(left - right) <= KV_TOLERANCE * max(left, right))
    return bool(left == right)


def _forced(setting: str, left: Any, right: Any, method: Any) -> bool:
    if setting == "async_scheduling":
        return left is True and right is False and method in NO_ASYNC_SCHEDULING
    # The V2 model runner lacks some methods; the engine then runs on V1.
    return setting == "runner" and (left, right) == ("V2", "V1")
