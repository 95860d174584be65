"""Is the output still the target's? Computed after every run, never claimed.

Greedy outputs are compared by token id. Where they part, the baseline scores both candidates at that
place: two candidates that lie closer together than the arithmetic's rounding are a numerical tie.

Sampled outputs are different texts by design. The baseline scores both (log-probabilities of the given
tokens, one prefill each): the mean log-probability a token of the speculative text must look like that
of the baseline's own text.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from app.engines.lane import Lane, TokenScore

Tokens = Literal["identical", "differs", "not_comparable"]

TIE_NATS = {"float32": 0.001, "float16": 0.032, "bfloat16": 0.25}
"""The widest gap that rounding explains, by dtype: two units in the last place of a logit between 16 and 32.

A bfloat16 has 8 significant bits, so its neighbours there lie 0.125 apart; a float16 has 11 (0.016). For
float32 the unit is 2e-6, but sums in another order differ by far more: 0.001 is what such sums make.
"""

CONSISTENT_NATS = 0.5
"""Means closer than this are never called apart: texts of one model on one prompt differ this much."""

CONSISTENT_ERRORS = 4.0
"""Beyond that, this many standard errors of the difference."""

SHORTEST_SCORED = 8
"""Fewer tokens than this say nothing about a mean."""


@dataclass(frozen=True, slots=True)
class OutputComparison:
    """What the two outputs have to do with each other. Log-probabilities in nats, by the baseline."""

    tokens: Tokens
    compared_tokens: int = 0
    first_difference: dict[str, Any] | None = None
    tie_gap_nats: float | None = None
    tie: bool | None = None
    mean_logprob: dict[str, float] | None = None
    consistent: bool | None = None
    consistency_note: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "compared_tokens": self.compared_tokens,
            "first_difference": self.first_difference,
            "tie_gap_nats": self.tie_gap_nats,
            "tie": self.tie,
            "mean_logprob": self.mean_logprob,
            "consistent": self.consistent,
            "consistency_note": self.consistency_note,
        }


NOT_COMPARABLE = OutputComparison(tokens="not_comparable")


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first index at which two token sequences differ; None when they are equal.

    A sequence that is the other's beginning differs where it ends.
    """
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


async def compare_greedy(
    baseline: Lane, prompt_ids: Sequence[int], base_ids: Sequence[int], spec_ids: Sequence[int]
) -> OutputComparison:
    """Compare two greedy outputs by token id, and weigh the first difference.

    Raises:
        EngineError: the baseline could not score.
    """
    compared = min(len(base_ids), len(spec_ids))
    index = first_difference(base_ids, spec_ids)
    if index is None:
        return OutputComparison(tokens="identical", compared_tokens=compared)
    if index >= compared:
        return OutputComparison(
            tokens="differs",
            compared_tokens=compared,
            first_difference={"index": index, "baseline": None, "speculative": None},
        )
    scores: list[TokenScore] = []
    for token in (base_ids[index], spec_ids[index]):
        scores += (await baseline.score(prompt_ids, [*base_ids[:index], token]))[-1:]
    base, spec = scores
    gap = abs(base.logprob - spec.logprob)
    allowed = TIE_NATS.get(str(baseline.engine.get("dtype")), TIE_NATS["bfloat16"])

    def candidate(score: TokenScore) -> dict[str, Any]:
        return {"id": score.token_id, "text": baseline.decode([score.token_id]), "logprob": round(score.logprob, 4)}

    return OutputComparison(
        tokens="differs",
        compared_tokens=compared,
        first_difference={"index": index, "baseline": candidate(base), "speculative": candidate(spec)},
        tie_gap_nats=round(gap, 4),
        tie=gap <= allowed,
    )


async def compare_sampled(
    baseline: Lane, prompt_ids: Sequence[int], base_ids: Sequence[int], spec_ids: Sequence[int]
) -> OutputComparison:
    """Score both sampled texts with the baseline, and say whether they look like one model's.

    Raises:
        EngineError: the baseline could not score.
    """
    if min(len(base_ids), len(spec_ids)) < SHORTEST_SCORED:
        return OutputComparison(
            tokens="not_comparable",
            consistency_note=f"Not scored: a text has fewer than {SHORTEST_SCORED} tokens.",
        )
    base = [score.logprob for score in await baseline.score(prompt_ids, base_ids)]
    spec = [score.logprob for score in await baseline.score(prompt_ids, spec_ids)]
    means = {"baseline": round(statistics.fmean(base), 4), "speculative": round(statistics.fmean(spec), 4)}
    consistent, allowed = is_consistent(base, spec)
    apart = abs(means["speculative"] - means["baseline"])
    note = f"The baseline gives the two texts {means['baseline']:.2f} and {means['speculative']:.2f} nats a token: " + (
        f"{apart:.2f} apart, within the {allowed:.2f} that sampling explains."
        if consistent
        else f"{apart:.2f} apart, more than the {allowed:.2f} that sampling explains. "
        "The speculative text is not what the target would write."
    )
    return OutputComparison(tokens="not_comparable", mean_logprob=means, consistent=consistent, consistency_note=note)


def is_consistent(baseline: Sequence[float], speculative: Sequence[float]) -> tuple[bool, float]:
    """Whether two texts' log-probabilities may come from one model, and the gap allowed, in nats.

    Welch's standard error of the difference of means, with a floor for what texts of one model on one
    prompt differ by anyway (their tokens aren't independent).
    """
    error = math.sqrt(
        statistics.variance(baseline) / len(baseline) + statistics.variance(speculative) / len(speculative)
    )
    allowed = max(CONSISTENT_NATS, CONSISTENT_ERRORS * error)
    return abs(statistics.fmean(speculative) - statistics.fmean(baseline)) <= allowed, allowed
