"""Live steps against the engine's own counts. ``S`` makes a step of a prefill, a draft, or a plain pass."""

from __future__ import annotations

import pytest

from app.engines.lane import Step
from app.engines.reconcile import reconcile


def S(text: str, accepted: int = 0, drafted: int = 0, *, pieces: bool = True) -> Step:
    ids = tuple(map(ord, text))
    return Step(float(ids[0]), ids, text, accepted, drafted, tuple(text) if pieces else None)


def counts(steps: tuple[Step, ...]) -> list[tuple[str, int, int]]:
    return [(step.text, step.accepted, step.drafted) for step in steps]


def test_steps_that_agree_stand() -> None:
    live = [S("a"), S("bcd", 2, 4), S("e"), S("f", 0, 4)]
    result = reconcile(live, [2, 0], [4, 4])
    assert (result.steps, result.agree, result.note) == (None, True, None)


def test_a_last_step_cut_by_the_budget_agrees() -> None:
    assert reconcile([S("a"), S("bc", 4, 4)], [4], [4]).agree


def test_a_pass_whose_drafts_the_grammar_threw_away_is_a_plain_pass() -> None:
    assert reconcile([S("a"), S("b"), S("cd", 1, 4)], [0, 1], [0, 4]).agree


def test_a_merged_step_is_split_by_the_engines_counts() -> None:
    live = [S("a"), S("bcdef"), S("gh", 1, 3)]
    result = reconcile(live, [2, 1, 1], [3, 3, 3], unsplit=frozenset({1}))
    assert result.agree
    assert result.steps is not None
    assert counts(result.steps) == [("a", 0, 0), ("bcd", 2, 3), ("ef", 1, 3), ("gh", 1, 3)]


def test_a_merged_prefill_keeps_its_own_token_apart() -> None:
    result = reconcile([S("abcd")], [2], [3], unsplit=frozenset({0}))
    assert result.steps is not None
    assert counts(result.steps) == [("a", 0, 0), ("bcd", 2, 3)]


def test_a_merged_last_step_may_be_cut_short() -> None:
    result = reconcile([S("a"), S("bcd")], [1, 3], [3, 3], unsplit=frozenset({1}))
    assert result.agree
    assert result.steps is not None
    assert counts(result.steps) == [("a", 0, 0), ("bc", 1, 3), ("d", 3, 3)]


@pytest.mark.parametrize("pieces", [True, False])
def test_splitting_loses_no_id_and_no_text(pieces: bool) -> None:
    live = [S("a"), S("bcdef", pieces=pieces), S("gh", pieces=pieces)]
    result = reconcile(live, [2, 1, 1], [3, 3, 3], unsplit=frozenset({1, 2}))
    assert result.steps is not None
    assert "".join(step.text for step in result.steps) == "abcdefgh"
    assert bytes(token for step in result.steps for token in step.ids) == b"abcdefgh"


def test_a_merged_step_that_hides_a_plain_pass_cannot_be_split() -> None:
    # Three tokens: a draft of one accepted, and a pass without a draft. Which came first can't be known.
    result = reconcile([S("a"), S("bcd")], [1], [3], unsplit=frozenset({1}))
    assert (result.steps, result.agree) == (None, False)


@pytest.mark.parametrize(
    ("accepted", "drafted"),
    [([2], [4]), ([1, 0], [4, 4]), ([2, 0, 1], [4, 4, 4]), ([], [])],
    ids=["missing", "other count", "one more", "none"],
)
def test_a_disagreement_is_told_with_both_sums(accepted: list[int], drafted: list[int]) -> None:
    result = reconcile([S("a"), S("bcd", 2, 4), S("f", 0, 4)], accepted, drafted)
    assert not result.agree
    assert result.steps is None
    assert result.note is not None
    assert "2 of 8 accepted" in result.note
    assert f"{sum(accepted)} of {sum(drafted)} accepted" in result.note


def test_a_step_in_the_middle_never_holds_less_than_it_accepted() -> None:
    assert not reconcile([S("a"), S("bc", 4, 4), S("d")], [4], [4]).agree


def test_lists_of_unequal_length_are_refused() -> None:
    assert not reconcile([S("a")], [1], []).agree
