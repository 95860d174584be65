"""The card's figures are those of the stored measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.drafters import card
from app.errors import PairError

DOCS = Path(__file__).parents[2] / "docs"


def run(**changes: object) -> dict[str, object]:
    base = {
        "tokens": 10,
        "first_tokens": 1,
        "decode_steps": 3,
        "decode_ms": 300.0,
        "drafts": 3,
        "accepted_at": [3, 2, 1],
    }
    return base | changes


def test_rates_are_sums_over_sums() -> None:
    runs = [run(), run(tokens=21, decode_steps=17, drafts=17, accepted_at=[3, 0, 0])]
    assert card.tokens_per_step(runs) == (9 + 20) / (3 + 17)
    assert card.acceptance(runs) == [6 / 20, 2 / 20, 1 / 20]


def test_speed_up_needs_a_baseline_of_its_own() -> None:
    baseline = {"tokens": 10, "first_tokens": 1, "decode_ms": 900.0}
    assert card.speedups([run(), run(baseline=baseline)]) == [pytest.approx(3.0)]


def test_the_card_shows_the_stored_results() -> None:
    text = (DOCS / card.CARD).read_text(encoding="utf-8")
    assert card.render(text, DOCS) == text, "run `python -m app.drafters card docs`"


def test_a_lost_marker_is_named() -> None:
    with pytest.raises(PairError, match="<!-- summary -->"):
        card.render("no tables", DOCS)
