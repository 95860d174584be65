"""Tiny checkpoints for the tests: real files, of a few hundred bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

WIDTHS = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "BOOL": 1}
TOKENS = {"a": 0, "b": 1, "ab": 2}
SPECIAL = {"<s>": 3, "</s>": 4}


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Write a safetensors file of zeros: name -> (dtype, shape)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * WIDTHS[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(end))


def write_tokenizer(
    folder: Path, tokens: Mapping[str, int] | None = None, special: Mapping[str, int] | None = None
) -> None:
    added = [
        {"id": index, "content": content, "special": True}
        for content, index in (SPECIAL if special is None else special).items()
    ]
    model = {"type": "BPE", "vocab": dict(TOKENS if tokens is None else tokens), "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))


def write_model(folder: Path, **config: Any) -> Path:
    """A Llama of hidden size 8 and 5 tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "vocab_size": 5, "num_hidden_layers": 4}
    (folder / "config.json").write_text(json.dumps({**values, "dtype": "bfloat16", **config}))
    write_safetensors(
        folder / "model.safetensors",
        {"model.embed_tokens.weight": ("BF16", (5, 8)), "lm_head.weight": ("BF16", (5, 8))},
    )
    write_tokenizer(folder)
    return folder


def write_head(folder: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]] | None = None, **config: Any) -> Path:
    """An EAGLE-3 head for it, with a draft vocabulary of 3."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 8, "vocab_size": 5, "draft_vocab_size": 3}
    (folder / "config.json").write_text(json.dumps({**values, "dtype": "bfloat16", **config}))
    default = {"fc.weight": ("BF16", (8, 24)), "lm_head.weight": ("BF16", (3, 8)), "d2t": ("I64", (3,))}
    write_safetensors(folder / "model.safetensors", default | dict(tensors or {}))
    return folder
