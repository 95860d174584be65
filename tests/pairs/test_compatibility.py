from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.errors import PairError
from app.pairs.compatibility import Model, check_draft_model, check_eagle3, check_tokenizers
from tests.pairs.checkpoints import SPECIAL, TOKENS, write_head, write_model, write_tokenizer


@pytest.fixture
def target(tmp_path: Path) -> Model:
    return Model("owner/target", write_model(tmp_path / "target"))


@pytest.fixture
def draft(tmp_path: Path) -> Model:
    return Model("owner/draft", write_model(tmp_path / "draft"))


def test_equal_tokenizers_fit(target: Model, draft: Model) -> None:
    check_draft_model(target, draft)


def test_another_vocabulary_size_is_refused_with_both_values(target: Model, tmp_path: Path) -> None:
    other = Model("owner/draft", write_model(tmp_path / "draft", vocab_size=6))
    with pytest.raises(
        PairError, match=r"owner/draft can't draft for owner/target: its vocab_size is 6, the target's is 5"
    ):
        check_draft_model(target, other)


def test_the_same_size_with_other_ids_is_refused(target: Model, draft: Model) -> None:
    write_tokenizer(draft.folder, tokens={"b": 0, "a": 1, "ab": 2})
    with pytest.raises(PairError, match=r"token 0 is 'a' in the target and 'b' in the draft \(5 and 5 tokens\)"):
        check_draft_model(target, draft)


def test_a_token_too_many_is_refused(target: Model, draft: Model) -> None:
    write_tokenizer(draft.folder, tokens={**TOKENS, "ba": 5})
    with pytest.raises(PairError, match=r"token 5 is no token in the target and 'ba' in the draft \(5 and 6 tokens\)"):
        check_draft_model(target, draft)


def test_a_special_token_of_one_side_is_refused(target: Model, draft: Model) -> None:
    write_tokenizer(draft.folder, tokens={**TOKENS, "</s>": 4}, special={"<s>": SPECIAL["<s>"]})
    with pytest.raises(PairError, match="'</s>' is a special token of the target only"):
        check_draft_model(target, draft)


def test_unigram_vocabularies_are_compared(target: Model, draft: Model) -> None:
    for model, tokens in ((target, ["x", "y"]), (draft, ["x", "z"])):
        data = {"model": {"type": "Unigram", "vocab": [[token, -1.0] for token in tokens]}, "added_tokens": []}
        (model.folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(PairError, match="token 1 is 'y' in the target and 'z' in the draft"):
        check_tokenizers(target, draft)


def test_sentencepiece_files_are_compared_by_content(target: Model, draft: Model) -> None:
    for model in (target, draft):
        (model.folder / "tokenizer.json").unlink()
        (model.folder / "tokenizer.model").write_bytes(b"one")
    check_tokenizers(target, draft)
    (draft.folder / "tokenizer.model").write_bytes(b"two")
    with pytest.raises(PairError, match=r"their tokenizer\.model are not the same file"):
        check_tokenizers(target, draft)


def test_a_draft_without_a_tokenizer_is_refused(target: Model, draft: Model) -> None:
    (draft.folder / "tokenizer.json").unlink()
    with pytest.raises(PairError, match=r"owner/draft has no tokenizer\.json"):
        check_tokenizers(target, draft)


def test_a_damaged_tokenizer_is_one_line(target: Model, draft: Model) -> None:
    (draft.folder / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(PairError, match=r"tokenizer\.json can't be read as a tokenizer"):
        check_tokenizers(target, draft)


def test_a_head_that_fits(target: Model, tmp_path: Path) -> None:
    check_eagle3(target, Model("head", write_head(tmp_path / "head")))
    check_eagle3(target, Model("head", write_head(tmp_path / "named", eagle_aux_hidden_state_layer_ids=[1, 2, 4])))
    nested: dict[str, Any] = {"hidden_size": 8, "vocab_size": 5}
    head = write_head(tmp_path / "speculator", hidden_size=None, vocab_size=None, transformer_layer_config=nested)
    check_eagle3(target, Model("head", head))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 16}, "it reads a hidden size of 16, the target's is 8"),
        ({"target_hidden_size": 4096}, "it reads a hidden size of 4096, the target's is 8"),
        ({"vocab_size": 7}, "its vocab_size is 7, the target's is 5"),
        ({"draft_vocab_size": 6}, "its draft_vocab_size is 6, the target's vocab_size is 5"),
        ({"draft_vocab_size": 2}, r"its lm_head\.weight is 3 x 8, which doesn't fit the draft_vocab_size 2"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 9]}, "reads the hidden states of layer 9, the target has 4 layers"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
            r"its fc\.weight is 8 x 24, which doesn't fit 2 hidden states of 8",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused_with_both_values(
    target: Model, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(PairError, match=message):
        check_eagle3(target, Model("head", write_head(tmp_path / "head", **config)))


def test_weights_that_contradict_the_config_are_found(target: Model, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", {"d2t": ("I64", (4,))})
    with pytest.raises(PairError, match="its d2t is 4, which doesn't fit the draft_vocab_size 3"):
        check_eagle3(target, Model("head", head))
