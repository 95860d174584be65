"""From what the engine reports each iteration to steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from app.engines.stats import Iteration, Pieces, Recorder, steps_of


def scheduler(accepted: int = 0, drafted: int = 0, usage: float = 0.5) -> Any:
    drafts = SimpleNamespace(num_accepted_tokens=accepted, num_draft_tokens=drafted) if drafted else None
    return SimpleNamespace(kv_cache_usage=usage, spec_decoding_stats=drafts)


def iteration(tokens: int) -> Any:
    return SimpleNamespace(num_generation_tokens=tokens)


def test_merged_outputs_are_split_by_their_iterations() -> None:
    recorder = Recorder()
    recorder.open()
    for accepted, drafted, tokens in ((0, 0, 1), (2, 4, 3), (0, 4, 1)):
        recorder.record(scheduler(accepted, drafted), iteration(tokens))
    parts = recorder.take(5)
    assert parts is not None
    steps = steps_of(range(5), "abcde", "abcde", parts, started_s=parts[0].at_s - 1, now_s=0)
    assert [(step.ids, step.text, step.accepted, step.drafted) for step in steps] == [
        ((0,), "a", 0, 0),
        ((1, 2, 3), "bcd", 2, 4),
        ((4,), "e", 0, 4),
    ]
    assert steps[0].t_ms == pytest.approx(1000)
    assert steps[1].pieces == ("b", "c", "d")


def test_an_iteration_of_a_chunked_prefill_yields_no_step() -> None:
    recorder = Recorder()
    recorder.open()
    recorder.record(scheduler(), None)
    recorder.record(scheduler(), iteration(0))
    recorder.record(scheduler(), iteration(1))
    assert recorder.take(1) is not None
    assert recorder.take(1) is None


def test_iterations_that_do_not_add_up_split_nothing() -> None:
    recorder = Recorder()
    recorder.open()
    recorder.record(scheduler(), iteration(3))
    assert recorder.take(2) is None


def test_two_requests_at_once_are_never_told_apart() -> None:
    recorder = Recorder()
    recorder.open()
    recorder.open()
    recorder.record(scheduler(), iteration(1))
    assert recorder.take(1) is None
    recorder.close()
    assert recorder.take(1) is None  # tokens of both may still be under way
    recorder.close()
    recorder.open()
    recorder.record(scheduler(), iteration(1))
    assert recorder.take(1) is not None


def test_nothing_is_kept_while_no_request_is_open() -> None:
    recorder = Recorder()
    recorder.record(scheduler(usage=0.25), iteration(4))
    recorder.open()
    assert recorder.take(4) is None
    assert recorder.kv_usage == 0.25


def test_an_output_without_iterations_is_one_step_without_counts() -> None:
    (step,) = steps_of([7, 8], "hi", None, None, started_s=1.0, now_s=1.5)
    assert (step.ids, step.text, step.accepted, step.drafted, step.pieces) == ((7, 8), "hi", 0, 0, None)
    assert step.t_ms == pytest.approx(500)


def test_text_that_cannot_be_told_apart_comes_with_the_last_step() -> None:
    parts = [Iteration(1.0, 1), Iteration(2.0, 2, 1, 4)]
    steps = steps_of([1, 2, 3], "xyz", None, parts, started_s=0, now_s=9)
    assert [step.text for step in steps] == ["", "xyz"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A byte-level tokenizer: each byte of a character is a token of its own."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return SimpleNamespace(_tokenizer=backend, encode=lambda text: backend.encode(text).ids)


def test_pieces_join_to_the_text_also_inside_a_character(tokenizer: Any) -> None:
    ids = tokenizer.encode("né🚲")
    pieces = Pieces(tokenizer, [])
    assert pieces.of(ids[:2], "n", ends_in_stop=False) == ["n", ""]
    assert pieces.of(ids[2:], "é🚲", ends_in_stop=False) == ["é", "", "", "", "🚲"]


def test_a_stop_token_has_no_piece(tokenizer: Any) -> None:
    ids = [*tokenizer.encode("ok"), 256]
    assert Pieces(tokenizer, []).of(ids, "ok", ends_in_stop=True) == ["o", "k", ""]


def test_pieces_that_differ_from_the_engines_text_are_dropped(tokenizer: Any) -> None:
    assert Pieces(tokenizer, []).of(tokenizer.encode("ok"), "no", ends_in_stop=False) is None


def test_a_tokenizer_of_another_library_has_no_pieces() -> None:
    assert Pieces(SimpleNamespace(), []).of([1], "x", ends_in_stop=False) is None
