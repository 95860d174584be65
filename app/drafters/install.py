"""Shipped weights + the target -> a checkpoint folder that vLLM loads as ``eagle3`` or ``draft_model``."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from app.drafters import weights
from app.drafters.eagle3 import CHECKPOINT_NAMES
from app.drafters.small import LAYER_NAMES, SmallSize
from app.drafters.target import read_config
from app.errors import PairError

Kind = Literal["eagle3", "draft_model"]
EMBEDDING = "model.embed_tokens.weight"


def tokenizer_fingerprint(folder: Path) -> str:
    """SHA-256 of a tokenizer's vocabulary: every token with its id, added tokens included.

    Raises:
        PairError: the folder holds no readable ``tokenizer.json``.
    """
    path = folder / "tokenizer.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        tokens = {**content["model"]["vocab"], **{t["content"]: t["id"] for t in content.get("added_tokens") or []}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PairError(f"{path} is no readable tokenizer ({error}). Build the target again.") from error
    digest = hashlib.sha256()
    for token, index in sorted(tokens.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{index}\t{token}\n".encode())
    return digest.hexdigest()


def target_embedding(folder: Path) -> Tensor:
    """The target's embedding ``[vocab, hidden]`` in fp32, without reading its other weights."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            if EMBEDDING in file.keys():
                tensor: Tensor = file.get_tensor(EMBEDDING)
                return tensor.float()
    raise PairError(f"No safetensors file in {folder} holds {EMBEDDING}. Build the target again.")


def check_fit(kind: Kind, target: Path, config: dict[str, Any], wanted: dict[str, Any], tokenizer: str) -> None:
    """Refuse a target that the drafter was not made for.

    Args:
        wanted: values that the target's config must have, by name.
        tokenizer: the fingerprint its tokenizer must have.

    Raises:
        PairError: naming the setting and both values.
    """
    for name, value in wanted.items():
        if config.get(name) != value:
            raise PairError(
                f"The {kind} drafter does not fit the target in {target}: it needs {name} = {value}, "
                f"the target has {config.get(name)}. Use the embedded target, or speculate with ngram."
            )
    found = tokenizer_fingerprint(target)
    if found != tokenizer:
        raise PairError(
            f"The {kind} drafter does not fit the target in {target}: their tokenizers differ "
            f"(fingerprints {tokenizer[:16]} and {found[:16]}). Use the embedded target, or speculate with ngram."
        )


def eagle3_checkpoint(
    tensors: dict[str, Tensor], aux_layers: list[int], config: dict[str, Any], embedding: Tensor
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights by vLLM's names and the config of an EAGLE-3 head.

    The embedding is left out: vLLM then shares the target's. ``d2t`` holds, for each draft token id,
    the distance to the target's id.
    """
    kept = tensors["kept"]
    result = {own: tensors[name] for name, own in CHECKPOINT_NAMES.items()}
    result["lm_head.weight"] = embedding[kept] + tensors["lm_head_change"]
    result["d2t"] = kept - torch.arange(len(kept))
    head_config = dict(
        config,
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1,
        draft_vocab_size=len(kept),
        tie_word_embeddings=False,
        eagle_aux_hidden_state_layer_ids=list(aux_layers),
    )
    return result, head_config


def small_checkpoint(
    tensors: dict[str, Tensor], size: dict[str, int], config: dict[str, Any], embedding: Tensor
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights by Hugging Face's names and the config of the stand-alone draft model."""
    own = embedding @ tensors["projection"]
    own.index_add_(0, tensors["frequent"], tensors["correction"])
    result = {EMBEDDING: own, "model.norm.weight": tensors["norm"]}
    dimensions = SmallSize(**size)
    for index in range(dimensions.layers):
        for name, full in LAYER_NAMES.items():
            result[f"model.layers.{index}.{full}"] = tensors[f"layers.{index}.{name}"]
    return result, dimensions.config(config)


def build(target_dir: Path, cache_dir: Path, kind: Kind, *, shipped: Path = weights.WEIGHTS) -> Path:
    """Make the drafter's checkpoint for a target, or find the one made before.

    Args:
        target_dir: the embedded target's checkpoint.
        cache_dir: where checkpoints are kept; the folder's name holds the hash of what it was made from.
        kind: ``eagle3`` or ``draft_model``.
        shipped: the folder of the shipped weights.

    Returns:
        The checkpoint folder (weights in fp32, ``config.json``, and the target's tokenizer).

    Raises:
        PairError: the shipped file is missing or damaged, or does not fit the target.
    """
    path, entry = weights.checked(kind, shipped)
    config = read_config(target_dir)
    check_fit(kind, target_dir, config, entry["target"], entry["tokenizer_sha256"])
    embedding = target_embedding(target_dir)
    source = hashlib.sha256(entry["sha256"].encode())
    source.update(json.dumps(config, sort_keys=True).encode())
    source.update(embedding.contiguous().numpy().tobytes())
    folder = cache_dir / f"{kind}-{source.hexdigest()[:16]}"
    if (folder / "config.json").is_file():
        return folder
    tensors, metadata = weights.read(path)
    if kind == "eagle3":
        checkpoint, own_config = eagle3_checkpoint(tensors, metadata["aux_layers"], config, embedding)
    else:
        checkpoint, own_config = small_checkpoint(tensors, metadata["size"], config, embedding)
    cache_dir.mkdir(parents=True, exist_ok=True)
    partial = cache_dir / f"{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    contiguous = {name: tensor.contiguous() for name, tensor in checkpoint.items()}
    save_file(contiguous, str(partial / "model.safetensors"), metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (target_dir / name).is_file():
            shutil.copyfile(target_dir / name, partial / name)
    (partial / "config.json").write_text(json.dumps(own_config, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder
