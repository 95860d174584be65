"""Whether two texts may come from one model."""

from __future__ import annotations

import random

import pytest

from app.race.comparison import first_difference, is_consistent


@pytest.mark.parametrize(
    ("left", "right", "index"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [1], 0), ([], [], None), ([5], [6], 0)],
)
def test_first_difference(left: list[int], right: list[int], index: int | None) -> None:
    assert first_difference(left, right) == index


def sampled(rng: random.Random, mean: float, spread: float, tokens: int) -> list[float]:
    return [-abs(rng.gauss(mean, spread)) for _ in range(tokens)]


@pytest.mark.parametrize("tokens", [16, 64, 256])
def test_texts_of_one_model_are_consistent(tokens: int) -> None:
    rng = random.Random(tokens)
    flagged = sum(not is_consistent(sampled(rng, 2, 2, tokens), sampled(rng, 2, 2, tokens))[0] for _ in range(300))
    assert flagged <= 3


@pytest.mark.parametrize("tokens", [32, 64, 256])
def test_nonsense_is_found(tokens: int) -> None:
    """Text that another distribution wrote scores several nats a token worse."""
    rng = random.Random(tokens)
    missed = sum(is_consistent(sampled(rng, 1, 1.5, tokens), sampled(rng, 7, 3, tokens))[0] for _ in range(300))
    assert missed == 0
