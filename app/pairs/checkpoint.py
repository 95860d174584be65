"""What a checkpoint's small files say: config.json, and the headers of its safetensors files.

No weights are read: a safetensors file starts with eight bytes that give the length of a JSON header, and the header
has every tensor's dtype and shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from app.errors import PairError

# Bytes of one value, by safetensors' dtype name.
WIDTHS: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
# The engine casts these to its own dtype; quantized and integer tensors stay what they are.
CAST = frozenset({"F64", "F32", "F16", "BF16"})
ENGINE_WIDTHS: Mapping[str, int] = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}

MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a checkpoint; ``dtype`` is safetensors' name of it."""

    dtype: str
    shape: tuple[int, ...]


def read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json; of a multimodal model the text part, of a speculator its layer's part on top.

    Raises:
        PairError: it isn't there, or is no JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PairError(
            f"{path} can't be read ({error.strerror}). A model's folder holds config.json, the tokenizer, and "
            "*.safetensors files."
        ) from error
    except ValueError as error:
        raise PairError(f"{path} is not valid JSON ({error}). Fetch or build the model again.") from error
    if not isinstance(config, dict):
        raise PairError(f"{path} holds no JSON object. Fetch or build the model again.")
    for part in ("text_config", "transformer_layer_config"):
        if isinstance(config.get(part), dict):
            config = {**config, **config[part]}
    return config


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that make up a checkpoint's weights; none where it has another format.

    Raises:
        PairError: the index names a file that isn't there, or is damaged.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            paths = [folder / name for name in sorted(set(weight_map.values()))]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise PairError(f"{index} is damaged. Fetch the model again.") from error
        for path in paths:
            if not path.is_file():
                raise PairError(f"{path} is missing, though {index.name} names it. Fetch the model again.")
        return tuple(paths)
    whole = folder / "model.safetensors"
    return (whole,) if whole.is_file() else tuple(sorted(folder.glob("*.safetensors")))


def tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by name; empty where its weights aren't safetensors files.

    Raises:
        PairError: a file is missing, cut short, or not a safetensors file.
    """
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        found.update(_header(path))
    return found


def weights_bytes(folder: Path, dtype: str) -> int | None:
    """Bytes of a checkpoint's weights once loaded in the engine's ``dtype`` ("float32", "bfloat16", …).

    A tied output layer that is stored nevertheless is not counted: the engine doesn't load it. None where the
    weights aren't safetensors files, or hold a dtype not known here.

    Raises:
        PairError: a file is missing or damaged.
    """
    tied = bool(read_config(folder).get("tie_word_embeddings"))
    total = 0
    for name, tensor in tensors(folder).items():
        if tied and name == "lm_head.weight":
            continue
        width = ENGINE_WIDTHS.get(dtype) if tensor.dtype in CAST else WIDTHS.get(tensor.dtype)
        if width is None:
            return None
        total += prod(tensor.shape) * width
    return total or None


def _header(path: Path) -> dict[str, Tensor]:
    damaged = f"{path} is damaged"
    remedy = "Fetch or build the model again."
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise PairError(f"{damaged}: it is no safetensors file, or was cut short. {remedy}")
        raw = stream.read(length)
    try:
        header = {name: entry for name, entry in json.loads(raw).items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        found = {name: Tensor(entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise PairError(f"{damaged}: its header can't be read. {remedy}") from error
    if 8 + length + end > size:
        raise PairError(f"{damaged}: it has {size} bytes, its header tells of {8 + length + end}. {remedy}")
    return found
