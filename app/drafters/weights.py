"""The shipped form of a drafter: 8-bit rows with a scale each, in safetensors, with a hash.

A matrix ``[rows, cols]`` is stored as int8 ``name`` and fp32 ``name.scale`` ``[rows]``; the value is
``int8 * scale``. Vectors are stored in fp32. What can be rebuilt from the target is not stored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from app.errors import PairError

WEIGHTS = Path(__file__).with_name("weights")
MANIFEST = "manifest.json"


def quantize_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Round to int8 by row: ``matrix ≈ int8 * scale[:, None]``, ``scale`` = largest magnitude / 127."""
    full = matrix.detach().float()
    scale = full.abs().amax(1).clamp(min=1e-12) / 127
    return (full / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def dequantize_rows(matrix: Tensor, scale: Tensor) -> Tensor:
    """Back to fp32."""
    return matrix.float() * scale[:, None]


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write a drafter's file. Floating matrices become 8-bit; ``metadata`` is stored as JSON."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        if tensor.is_floating_point() and tensor.dim() == 2:
            stored[name], stored[name + ".scale"] = (part.contiguous() for part in quantize_rows(tensor))
        elif tensor.is_floating_point():
            stored[name] = tensor.float().contiguous()
        else:
            stored[name] = tensor.to(torch.int32).contiguous()
    save_file(stored, str(path), metadata={"specduel": json.dumps(metadata, sort_keys=True)})


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors, dequantized to fp32 (ids as int64), and the metadata."""
    tensors: dict[str, Tensor] = {}
    with safe_open(str(path), framework="pt") as file:
        metadata = json.loads(file.metadata()["specduel"])
        names = set(file.keys())
        for name in sorted(names):
            if name.endswith(".scale"):
                continue
            tensor = file.get_tensor(name)
            if tensor.dtype == torch.int8:
                tensor = dequantize_rows(tensor, file.get_tensor(name + ".scale"))
            tensors[name] = tensor.long() if tensor.dtype == torch.int32 else tensor
    return tensors, metadata


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def checked(kind: str, folder: Path = WEIGHTS) -> tuple[Path, dict[str, Any]]:
    """The shipped file of a drafter and its entry in the manifest, once its hash agrees with that.

    Raises:
        PairError: the file is missing, or not the one that was shipped.
    """
    manifest_path = folder / MANIFEST
    if not manifest_path.is_file():
        raise PairError(f"{manifest_path} is missing. Install specduel again: it ships with the drafters.")
    manifest: dict[str, Any] = json.loads(manifest_path.read_text(encoding="utf-8"))
    if kind not in manifest:
        raise PairError(f"No drafter is called {kind!r}. There are {', '.join(sorted(manifest))}.")
    entry: dict[str, Any] = manifest[kind]
    path = folder / entry["file"]
    if not path.is_file():
        raise PairError(f"{path} is missing. Install specduel again: it ships with the drafters.")
    found = sha256(path)
    if found != entry["sha256"]:
        raise PairError(
            f"{path} is damaged: its SHA-256 is {found}, expected {entry['sha256']}. Install specduel again."
        )
    return path, entry
