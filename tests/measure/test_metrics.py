"""The metrics' definitions, on steps small enough to reckon by hand."""

from __future__ import annotations

import random

import pytest

from app.engines.lane import Step
from app.measure.metrics import (
    acceptance_by_position,
    compare,
    cost_per_million_tokens,
    lane_metrics,
    percentile,
    recent_tok_s,
    time_to_tokens,
)


def steps_of(*steps: tuple[float, int, int, int]) -> list[Step]:
    """Steps from (t_ms, tokens, accepted, drafted)."""
    return [Step(t, tuple(range(n)), "x" * n, accepted, drafted) for t, n, accepted, drafted in steps]


SPECULATIVE = steps_of((100, 1, 0, 0), (150, 3, 2, 4), (200, 1, 0, 4), (260, 5, 4, 4))
BASELINE = steps_of((90, 1, 0, 0), *((90 + 40 * i, 1, 0, 0) for i in range(1, 10)))


def test_rates_are_sums_over_sums() -> None:
    metrics = lane_metrics(SPECULATIVE, prompt_tokens=7)
    assert metrics.output_tokens == 10
    assert metrics.ttft_ms == 100
    assert metrics.total_ms == 260
    assert metrics.decode_tok_s == pytest.approx(1000 * 9 / 160)
    assert metrics.tpot_ms == pytest.approx(160 / 9)
    assert metrics.tokens_per_step == pytest.approx(9 / 3)
    assert metrics.step_ms_mean == pytest.approx(160 / 3)
    assert metrics.acceptance_rate == pytest.approx(6 / 12)
    assert metrics.prefill_share == pytest.approx(100 / 260)
    assert metrics.prompt_tokens == 7


def test_the_first_steps_tokens_are_not_decode_tokens() -> None:
    """A first step may hold several tokens; none of them took decode time."""
    metrics = lane_metrics(steps_of((100, 4, 3, 4), (200, 2, 1, 4)), prompt_tokens=1)
    assert metrics.decode_tok_s == pytest.approx(20)
    assert metrics.tokens_per_step == pytest.approx(2)


def test_what_cannot_be_measured_is_none_and_not_zero() -> None:
    nothing = lane_metrics([], prompt_tokens=3)
    assert nothing.ttft_ms is None
    assert nothing.decode_tok_s is None
    assert nothing.acceptance_rate is None
    assert nothing.acceptance_by_position is None
    one = lane_metrics(steps_of((100, 1, 0, 0)), prompt_tokens=3)
    assert one.ttft_ms == 100
    assert one.decode_tok_s is None
    assert one.tokens_per_step is None
    assert lane_metrics(BASELINE, prompt_tokens=3).acceptance_rate is None


def test_zero_acceptance_is_zero_when_something_was_drafted() -> None:
    assert lane_metrics(steps_of((1, 1, 0, 0), (2, 1, 0, 4)), prompt_tokens=1).acceptance_rate == 0


def test_acceptance_by_position_is_unconditional_over_all_drafts() -> None:
    assert acceptance_by_position(SPECULATIVE) == pytest.approx((2 / 3, 2 / 3, 1 / 3, 1 / 3))
    assert acceptance_by_position(SPECULATIVE, 5) == pytest.approx((2 / 3, 2 / 3, 1 / 3, 1 / 3, 0))


def test_steps_that_drafted_nothing_are_no_drafts() -> None:
    sparse = steps_of((1, 1, 0, 0), (2, 1, 0, 0), (3, 2, 1, 2))
    assert acceptance_by_position(sparse) == pytest.approx((1.0, 0.0))


def test_the_identity_holds() -> None:
    """decode speed-up = tokens per step / cost per step, for any baseline that yields one token a step."""
    rng = random.Random(4)
    for _ in range(50):
        base, spec = [], []
        t = rng.uniform(1, 100)
        for _ in range(rng.randint(2, 60)):
            base.append((t, 1, 0, 0))
            t += rng.uniform(0.5, 50)
        t = rng.uniform(1, 100)
        for _ in range(rng.randint(2, 60)):
            accepted = rng.randint(0, 4)
            spec.append((t, accepted + 1, accepted, 4))
            t += rng.uniform(0.5, 50)
        ratios = compare(steps_of(*base), steps_of(*spec), alone=True)
        per_step = lane_metrics(steps_of(*spec), prompt_tokens=1).tokens_per_step
        assert ratios.step_cost_ratio is not None
        assert per_step is not None
        assert ratios.decode_speedup == pytest.approx(per_step / ratios.step_cost_ratio, rel=1e-9)
        assert ratios.break_even_tokens_per_step == ratios.step_cost_ratio


def test_contended_lanes_have_no_step_cost() -> None:
    ratios = compare(BASELINE, SPECULATIVE, alone=False)
    assert ratios.step_cost_ratio is None
    assert ratios.decode_speedup is not None


def test_a_loss_stays_a_loss() -> None:
    slow = steps_of((100, 1, 0, 0), (300, 1, 0, 4), (500, 2, 1, 4))
    ratios = compare(BASELINE, slow, alone=True)
    assert ratios.decode_speedup is not None
    assert ratios.decode_speedup < 1


def test_total_speedup_counts_the_same_number_of_tokens() -> None:
    """The longer output is timed to the shorter one's length, prefill included."""
    longer = [*BASELINE, *steps_of((1000, 1, 0, 0), (2000, 1, 0, 0))]
    assert compare(longer, SPECULATIVE, alone=True).total_speedup == pytest.approx(BASELINE[-1].t_ms / 260)


def test_an_empty_lane_gives_no_ratio() -> None:
    ratios = compare(BASELINE, [], alone=True)
    assert ratios.decode_speedup is None
    assert ratios.total_speedup is None


def test_time_to_tokens() -> None:
    assert time_to_tokens(SPECULATIVE, 4) == 150
    assert time_to_tokens(SPECULATIVE, 5) == 200
    assert time_to_tokens(SPECULATIVE, 11) is None


def test_recent_rate_looks_back_one_window() -> None:
    slow_then_fast = steps_of(
        *((1000 * i, 1, 0, 0) for i in range(5)), *((4000 + 100 * i, 1, 0, 0) for i in range(1, 31))
    )
    assert recent_tok_s(slow_then_fast, now_ms=7000, window_ms=2000) == pytest.approx(10)
    assert recent_tok_s(slow_then_fast[:1], now_ms=10) is None
    assert recent_tok_s(slow_then_fast[:3], now_ms=2000, window_ms=5000) == pytest.approx(1)


def test_percentiles() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile([0, 10], 0.95) == pytest.approx(9.5)


def test_cost_needs_a_price() -> None:
    assert cost_per_million_tokens(100, 1000, None) is None
    assert cost_per_million_tokens(0, 1000, 3.6) is None
    assert cost_per_million_tokens(100, 1000, 3.6) == pytest.approx(10)
