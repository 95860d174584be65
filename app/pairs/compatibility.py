"""Do a target and a draft fit? Asked of their small files, before gigabytes are loaded.

vLLM compares vocabulary *sizes*. Two tokenizers of one size can still number their tokens differently: then every
draft is nonsense, nothing is accepted, and no error is raised. So the tokenizers themselves are compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import PairError
from app.pairs.checkpoint import Tensor, read_config, tensors

# Tokenizer files that are compared byte by byte where a model has no tokenizer.json.
OPAQUE_TOKENIZERS = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json")
DEFAULT_AUX_LAYERS = 3


@dataclass(frozen=True, slots=True)
class Model:
    """A model's name, for messages, and the folder with its small files."""

    name: str
    folder: Path


def check_draft_model(target: Model, draft: Model) -> None:
    """Check that a stand-alone draft model speaks the target's tokens.

    Raises:
        PairError: the vocabulary sizes or the tokenizers differ; the message names both values.
    """
    ours, theirs = read_config(target.folder).get("vocab_size"), read_config(draft.folder).get("vocab_size")
    if ours != theirs:
        raise PairError(
            f"{draft.name} can't draft for {target.name}: its vocab_size is {theirs}, the target's is {ours}. "
            "Choose a draft of the same model family."
        )
    check_tokenizers(target, draft)


def check_tokenizers(target: Model, draft: Model) -> None:
    """Compare two tokenizers: every token's id, and which tokens are special.

    Raises:
        PairError: they differ, or can't be compared; the message shows the first difference.
    """
    unlike = f"{draft.name} can't draft for {target.name}: their tokenizers differ"
    remedy = "Choose a draft that was trained with the target's tokenizer."
    files = [model.folder / "tokenizer.json" for model in (target, draft)]
    if all(path.is_file() for path in files):
        ours, theirs = (_Vocabulary.read(path) for path in files)
        if ours.tokens != theirs.tokens:
            raise PairError(f"{unlike}: {_first_difference(ours.tokens, theirs.tokens)}. {remedy}")
        if ours.special != theirs.special:
            token = min(ours.special ^ theirs.special)
            owner = "target" if token in ours.special else "draft"
            raise PairError(f"{unlike}: {token!r} is a special token of the {owner} only. {remedy}")
        return
    for name in OPAQUE_TOKENIZERS:
        pair = [model.folder / name for model in (target, draft)]
        if all(path.is_file() for path in pair):
            if pair[0].read_bytes() != pair[1].read_bytes():
                raise PairError(f"{unlike}: their {name} are not the same file. {remedy}")
            return
    lacking = draft if files[0].is_file() else target
    raise PairError(
        f"{lacking.name} has no tokenizer.json in {lacking.folder}, so it can't be told whether the tokenizers of "
        "target and draft agree. Put the tokenizer files beside the weights."
    )


def check_eagle3(target: Model, draft: Model) -> None:
    """Check that an EAGLE-3 head was made for this target.

    Compared: the target hidden size that the head reads (its ``fc`` takes three auxiliary hidden states, or as many as
    its config names), the vocabulary, and the draft vocabulary with its map to the target's ids.

    Raises:
        PairError: something doesn't fit; the message names both values.
    """
    config, head = read_config(target.folder), read_config(draft.folder)
    unfit = f"{draft.name} is no EAGLE-3 head for {target.name}"
    remedy = "Choose a head that was trained for this target."

    hidden = config.get("hidden_size")
    reads = head.get("target_hidden_size") or head.get("hidden_size")
    if not isinstance(hidden, int) or reads != hidden:
        raise PairError(f"{unfit}: it reads a hidden size of {reads}, the target's is {hidden}. {remedy}")
    vocabulary = config.get("vocab_size")
    if head.get("vocab_size") != vocabulary:
        raise PairError(f"{unfit}: its vocab_size is {head.get('vocab_size')}, the target's is {vocabulary}. {remedy}")
    drafts = head.get("draft_vocab_size") or vocabulary
    if not isinstance(drafts, int) or not isinstance(vocabulary, int) or not 0 < drafts <= vocabulary:
        raise PairError(f"{unfit}: its draft_vocab_size is {drafts}, the target's vocab_size is {vocabulary}. {remedy}")
    layers = config.get("num_hidden_layers")
    chosen = _aux_layers(head)
    if isinstance(layers, int) and chosen and max(chosen) > layers:
        raise PairError(
            f"{unfit}: it reads the hidden states of layer {max(chosen)}, the target has {layers} layers. {remedy}"
        )
    _check_eagle3_weights(
        tensors(draft.folder), unfit, remedy, hidden=hidden, drafts=drafts, layers=len(chosen) or DEFAULT_AUX_LAYERS
    )


def _check_eagle3_weights(
    found: Mapping[str, Tensor], unfit: str, remedy: str, *, hidden: int, drafts: int, layers: int
) -> None:
    """Compare the head's tensors with what its config promises; tensors that aren't there are not missed."""
    by_tail = {name.removeprefix("model."): tensor for name, tensor in found.items()}
    expected = {
        "fc.weight": (1, layers * hidden, f"{layers} hidden states of {hidden}"),
        "lm_head.weight": (0, drafts, f"the draft_vocab_size {drafts}"),
        "d2t": (0, drafts, f"the draft_vocab_size {drafts}"),
    }
    for name, (axis, size, meaning) in expected.items():
        if (tensor := by_tail.get(name)) is not None and tensor.shape[axis] != size:
            raise PairError(
                f"{unfit}: its {name} is {' x '.join(map(str, tensor.shape))}, which doesn't fit {meaning}. {remedy}"
            )


def _aux_layers(head: Mapping[str, Any]) -> tuple[int, ...]:
    nested = head.get("eagle_config")
    ids = head.get("eagle_aux_hidden_state_layer_ids")
    if ids is None and isinstance(nested, dict):
        ids = nested.get("eagle_aux_hidden_state_layer_ids")
    return tuple(ids) if isinstance(ids, list) and all(isinstance(item, int) for item in ids) else ()


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: Mapping[str, int]
    special: frozenset[str]

    @classmethod
    def read(cls, path: Path) -> _Vocabulary:
        """Read a tokenizer.json: the model's own vocabulary, and the tokens added on top."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            own = data["model"]["vocab"]
            # Unigram models keep a list of [token, score]; the place in the list is the id.
            tokens = dict(own) if isinstance(own, dict) else {entry[0]: index for index, entry in enumerate(own)}
            added = data.get("added_tokens") or []
            tokens.update({entry["content"]: entry["id"] for entry in added})
            special = frozenset(entry["content"] for entry in added if entry.get("special"))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise PairError(f"{path} can't be read as a tokenizer. Fetch or build the model again.") from error
        return cls(tokens, special)


def _first_difference(ours: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    mine, yours = ({index: token for token, index in tokens.items()} for tokens in (ours, theirs))
    index = min(key for key in mine.keys() | yours.keys() if mine.get(key) != yours.get(key))
    named = [repr(side[index]) if index in side else "no token" for side in (mine, yours)]
    return (
        f"token {index} is {named[0]} in the target and {named[1]} in the draft "
        f"({len(ours):,} and {len(theirs):,} tokens)"
    )
