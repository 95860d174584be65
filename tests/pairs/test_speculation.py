"""Choosing another method for a pair while a server runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import PairError
from app.pairs import catalogue
from app.pairs.speculation import ScriptedSpeculation, Speculation


def embedded(tmp_path: Path) -> Speculation:
    return Speculation(catalogue.load("embedded"), cache_dir=tmp_path, device="cpu")


def test_every_method_can_be_chosen_and_left_again(tmp_path: Path) -> None:
    first = embedded(tmp_path)
    assert {"ngram", first.pair.method} <= set(first.methods)
    for method in first.methods:
        chosen = first.with_method(method, None)
        assert chosen.pair.method == method
        assert chosen.methods == first.methods
        assert chosen.with_method(first.pair.method, None).pair == first.pair


def test_the_number_of_drafted_tokens_can_be_chosen(tmp_path: Path) -> None:
    chosen = embedded(tmp_path).with_method("ngram", 7)
    assert chosen.as_dict()["num_speculative_tokens"] == 7
    with pytest.raises(PairError, match="must be 1 to"):
        embedded(tmp_path).with_method(None, 1000)


def test_an_unknown_method_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(PairError, match="ngram"):
        embedded(tmp_path).with_method("eagle9", None)


def test_a_missing_model_is_told_when_it_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(PairError, match="pairs build embedded"):
        embedded(tmp_path).resolve()


def test_scripted_lanes_have_one_method() -> None:
    assert ScriptedSpeculation(4).methods == ("scripted",)
    assert ScriptedSpeculation(4).as_dict()["method"] == "scripted"
