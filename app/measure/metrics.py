"""The metrics, as pure functions over steps.

Definitions, for one lane's run with n output tokens, n_first of them in the first step:

* ``ttft_ms``: from handing the request to the engine until the first token ids.
* ``decode_tok_s`` = (n - n_first) / (t_last - t_first).
* ``tpot_ms`` = 1000 / ``decode_tok_s``.
* ``tokens_per_step`` = (n - n_first) / decode steps: the acceptance length, the target's own token included.
* ``acceptance_rate`` = sum of accepted / sum of drafted.
* ``acceptance_by_position[i]`` = drafts whose first i+1 tokens were all accepted / drafts (unconditional).
* ``step_cost_ratio`` = mean decode step time, speculative / baseline, each lane alone.
* ``decode_speedup`` = ``decode_tok_s`` speculative / baseline = ``tokens_per_step`` / ``step_cost_ratio``
  when the baseline yields one token a step.

Rates are sums over sums, never means of rates. What can't be measured is None. Tokens are counted by ids.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from app.engines.lane import Step


@dataclass(frozen=True, slots=True)
class LaneMetrics:
    """One lane's figures for one run. Times in ms, rates in tokens/s, fractions 0 to 1."""

    output_tokens: int
    prompt_tokens: int
    steps: int
    ttft_ms: float | None
    total_ms: float | None
    decode_tok_s: float | None
    tpot_ms: float | None
    step_ms_mean: float | None
    step_ms_p50: float | None
    step_ms_p95: float | None
    tokens_per_step: float | None
    drafted_tokens: int
    accepted_tokens: int
    acceptance_rate: float | None
    acceptance_by_position: tuple[float, ...] | None
    prefill_share: float | None
    cost_per_million_tokens: float | None

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        if self.acceptance_by_position is not None:
            values["acceptance_by_position"] = list(self.acceptance_by_position)
        return values


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two lanes' metrics say about each other. All ratios; None where one can't be had."""

    decode_speedup: float | None
    step_cost_ratio: float | None
    total_speedup: float | None

    @property
    def break_even_tokens_per_step(self) -> float | None:
        """The tokens per step at which speculation is neither faster nor slower: the cost of a step."""
        return self.step_cost_ratio


def lane_metrics(
    steps: Sequence[Step],
    *,
    prompt_tokens: int,
    draft_length: int | None = None,
    price_per_hour: float | None = None,
) -> LaneMetrics:
    """Compute one lane's figures.

    Args:
        steps: the steps in order, ``t_ms`` from the moment the request was handed to the engine.
        prompt_tokens: tokens of the prompt.
        draft_length: positions of ``acceptance_by_position``; the longest draft seen when None.
        price_per_hour: what the device costs an hour, in any currency; None: no cost is computed.
    """
    tokens = sum(len(step.ids) for step in steps)
    ttft_ms = total_ms = decode_tok_s = tokens_per_step = mean = p50 = p95 = share = None
    if steps:
        ttft_ms, total_ms = steps[0].t_ms, steps[-1].t_ms
        share = ttft_ms / total_ms if total_ms > 0 else None
    if len(steps) > 1:
        decoded = tokens - len(steps[0].ids)
        elapsed_ms = steps[-1].t_ms - steps[0].t_ms
        tokens_per_step = decoded / (len(steps) - 1)
        gaps = [later.t_ms - earlier.t_ms for earlier, later in itertools.pairwise(steps)]
        mean, p50, p95 = statistics.fmean(gaps), percentile(gaps, 0.5), percentile(gaps, 0.95)
        decode_tok_s = 1000 * decoded / elapsed_ms if elapsed_ms > 0 else None
    drafted, accepted = sum(step.drafted for step in steps), sum(step.accepted for step in steps)
    return LaneMetrics(
        output_tokens=tokens,
        prompt_tokens=prompt_tokens,
        steps=len(steps),
        ttft_ms=ttft_ms,
        total_ms=total_ms,
        decode_tok_s=decode_tok_s,
        tpot_ms=1000 / decode_tok_s if decode_tok_s else None,
        step_ms_mean=mean,
        step_ms_p50=p50,
        step_ms_p95=p95,
        tokens_per_step=tokens_per_step,
        drafted_tokens=drafted,
        accepted_tokens=accepted,
        acceptance_rate=accepted / drafted if drafted else None,
        acceptance_by_position=acceptance_by_position(steps, draft_length),
        prefill_share=share,
        cost_per_million_tokens=cost_per_million_tokens(tokens, total_ms, price_per_hour),
    )


def acceptance_by_position(steps: Sequence[Step], draft_length: int | None = None) -> tuple[float, ...] | None:
    """Unconditional acceptance at each draft position; None while nothing was drafted.

    Position i counts the drafts whose first i+1 tokens were all accepted, over all drafts,
    shorter ones included.
    """
    drafts = [step for step in steps if step.drafted]
    if not drafts:
        return None
    length = draft_length or max(step.drafted for step in drafts)
    return tuple(sum(step.accepted > position for step in drafts) / len(drafts) for position in range(length))


def percentile(values: Sequence[float], fraction: float) -> float | None:
    """The value below which ``fraction`` of the values lie, linear between neighbours; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def recent_tok_s(steps: Sequence[Step], *, now_ms: float, window_ms: float = 2000.0) -> float | None:
    """Output rate over the last ``window_ms`` of decoding, in tokens/s; None before the second step.

    The window starts at a step, so that its tokens and its time belong together.
    """
    if len(steps) < 2:
        return None
    begin = bisect.bisect_left(steps, now_ms - window_ms, hi=len(steps) - 2, key=lambda step: step.t_ms)
    begin = max(0, begin - 1)
    elapsed_ms = steps[-1].t_ms - steps[begin].t_ms
    if elapsed_ms <= 0:
        return None
    return 1000 * sum(len(step.ids) for step in steps[begin + 1 :]) / elapsed_ms


def time_to_tokens(steps: Sequence[Step], tokens: int) -> float | None:
    """``t_ms`` of the step that brings the output to at least ``tokens`` tokens; None if none does."""
    count = 0
    for step in steps:
        count += len(step.ids)
        if count >= tokens:
            return step.t_ms
    return None


def cost_per_million_tokens(tokens: int, elapsed_ms: float | None, price_per_hour: float | None) -> float | None:
    """Price of a million output tokens at one stream's pace, prefill included, in the price's currency.

    None without a price, or while nothing was generated.
    """
    if price_per_hour is None or not elapsed_ms or not tokens:
        return None
    tokens_per_hour = tokens / elapsed_ms * 3_600_000
    return price_per_hour / tokens_per_hour * 1_000_000


def compare(baseline: Sequence[Step], speculative: Sequence[Step], *, alone: bool) -> Comparison:
    """Compare two lanes that did equal work: same prompt, sampling settings and token budget.

    Args:
        baseline: the baseline's steps.
        speculative: the speculative lane's steps.
        alone: whether each lane had its device to itself; the step cost means nothing otherwise.
    """
    base, spec = lane_metrics(baseline, prompt_tokens=0), lane_metrics(speculative, prompt_tokens=0)
    tokens = min(base.output_tokens, spec.output_tokens)
    base_total, spec_total = time_to_tokens(baseline, tokens), time_to_tokens(speculative, tokens)
    return Comparison(
        decode_speedup=_ratio(spec.decode_tok_s, base.decode_tok_s),
        step_cost_ratio=_ratio(spec.step_ms_mean, base.step_ms_mean) if alone else None,
        total_speedup=_ratio(base_total, spec_total) if tokens else None,
    )


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    if numerator is None or not denominator:
        return None
    return numerator / denominator
