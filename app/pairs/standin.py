"""The stand-in target: the embedded model widened to an 8B model's cost, with its answers unchanged.

Speculation pays on a GPU when the target is large; no large model can be had without an account or a
network. So each matrix of the embedded target goes into the top-left block of a wide one. Entries
that only ever meet zeros are random, and entries that would write outside the block are zero: the
wide model computes the narrow one's logits at the wide one's cost in memory traffic and arithmetic.

RMSNorm divides by the root mean square over the *width*. With ``h`` live values of ``H``, that mean
is ``h / H`` of the narrow one; weights times ``sqrt(h / H)`` and an epsilon times ``h / H`` undo it.

It is a stand-in, and must be labelled so wherever its figures are shown.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.errors import PairError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class WideShape:
    """The wide model's dimensions. The default costs what an 8B model does: 16.3 GB in bf16."""

    hidden: int = 4096
    intermediate: int = 18432
    heads: int = 64
    kv_heads: int = 8


class _Widener:
    """Places narrow tensors in wide ones. Random fillings depend on the tensor's name alone."""

    def __init__(self, config: dict[str, Any], wide: WideShape, device: torch.device, dtype: torch.dtype) -> None:
        self.wide, self.device, self.dtype = wide, device, dtype
        self.hidden: int = config["hidden_size"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config.get("head_dim") or self.hidden // self.heads
        self.group, self.wide_group = self.heads // self.kv_heads, wide.heads // wide.kv_heads
        limits = {
            "hidden_size": (self.hidden, wide.hidden),
            "intermediate_size": (config["intermediate_size"], wide.intermediate),
            "num_key_value_heads": (self.kv_heads, wide.kv_heads),
            "heads a group": (self.group, self.wide_group),
        }
        for name, (narrow, target) in limits.items():
            if target < narrow:
                raise PairError(f"Cannot widen {name} from {narrow} to {target}: it must not shrink.")

    def random(self, name: str, rows: int, cols: int) -> Tensor:
        import torch

        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        generator = torch.Generator(device=self.device).manual_seed(seed)
        return torch.randn(rows, cols, generator=generator, device=self.device, dtype=self.dtype) * 0.02

    def zeros(self, rows: int, cols: int) -> Tensor:
        import torch

        return torch.zeros(rows, cols, device=self.device, dtype=self.dtype)

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype)

    def query_rows(self) -> Tensor:
        """Where each narrow query row goes: head i of KV group i // g takes slot (i // g) * G + i % g."""
        import torch

        slots = [(i // self.group) * self.wide_group + i % self.group for i in range(self.heads)]
        d = self.head_dim
        return torch.cat([torch.arange(slot * d, (slot + 1) * d) for slot in slots]).to(self.device)

    def norm(self, tensor: Tensor) -> Tensor:
        import torch

        scaled = tensor.to(self.device).float() * math.sqrt(self.hidden / self.wide.hidden)
        rest = torch.ones(self.wide.hidden - self.hidden, device=self.device)
        return torch.cat([scaled, rest]).to(self.dtype)

    def columns(self, name: str, tensor: Tensor, rows: int, parts: int = 1, at: Tensor | None = None) -> Tensor:
        """A matrix whose input is live in the first ``hidden`` of each of ``parts`` wide parts.

        ``at`` are the wide rows that the narrow ones take (default: the first); the others are random.
        """
        h, wide = self.hidden, self.wide.hidden
        result = self.random(name, rows, parts * wide)
        for part in range(parts):
            block = self.place(tensor[:, part * h : (part + 1) * h])
            if at is None:
                result[: tensor.shape[0], part * wide : part * wide + h] = block
            else:
                result[at, part * wide : part * wide + h] = block
        return result

    def outward(self, tensor: Tensor, cols: int, at: Tensor | None = None) -> Tensor:
        """A matrix that writes to the hidden state: zero outside the block, so that it stays zero there."""
        result = self.zeros(self.wide.hidden, cols)
        if at is None:
            result[: tensor.shape[0], : tensor.shape[1]] = self.place(tensor)
        else:
            result[: tensor.shape[0]].index_copy_(1, at, self.place(tensor))
        return result

    def layer(self, prefix: str, get: Any, norms: tuple[str, ...], parts: int = 1) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one decoder layer; ``parts`` 2 is an EAGLE-3 layer, which sees embedding and state."""
        w, d = self.wide, self.head_dim
        rows = self.query_rows()
        for name in norms:
            yield f"{prefix}{name}.weight", self.norm(get(f"{prefix}{name}.weight"))
        name = f"{prefix}self_attn.q_proj.weight"
        yield name, self.columns(name, get(name), w.heads * d, parts, rows)
        for which in ("k", "v"):
            name = f"{prefix}self_attn.{which}_proj.weight"
            yield name, self.columns(name, get(name), w.kv_heads * d, parts)
        name = f"{prefix}self_attn.o_proj.weight"
        yield name, self.outward(get(name), w.heads * d, rows)
        for which in ("gate", "up"):
            name = f"{prefix}mlp.{which}_proj.weight"
            yield name, self.columns(name, get(name), w.intermediate)
        name = f"{prefix}mlp.down_proj.weight"
        yield name, self.outward(get(name), w.intermediate)

    def config(self, config: dict[str, Any]) -> dict[str, Any]:
        w = self.wide
        return dict(
            config,
            hidden_size=w.hidden,
            intermediate_size=w.intermediate,
            num_attention_heads=w.heads,
            num_key_value_heads=w.kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=config["rms_norm_eps"] * self.hidden / w.hidden,
            dtype=str(self.dtype).removeprefix("torch."),
        )


class _Reader:
    """Tensors of a checkpoint folder by name, read one at a time."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self.files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(str(path), framework="pt") as file:
                self.files.update(dict.fromkeys(file.keys(), path))
        if not self.files:
            raise PairError(f"{folder} holds no safetensors file. Build the embedded target first.")

    def __call__(self, name: str) -> Tensor:
        from safetensors import safe_open

        if name not in self.files:
            raise PairError(f"The checkpoint lacks {name}. Build it again.")
        with safe_open(str(self.files[name]), framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor


def _setting(device: str | None, dtype: str) -> tuple[torch.device, torch.dtype]:
    import torch

    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(chosen), getattr(torch, dtype)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise PairError(f"{folder} holds no config.json. Build the embedded target first.")
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


def _finish(partial: Path, out: Path, config: dict[str, Any], tokenizer: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, partial / name)
    (partial / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


def _start(out: Path) -> Path:
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def build(
    target_dir: Path,
    out_dir: Path,
    wide: WideShape | None = None,
    *,
    dtype: str = "bfloat16",
    device: str | None = None,
) -> Path:
    """Widen the embedded target.

    One layer at a time is in memory (0.5 GB at the default shape), one file a layer.

    Args:
        target_dir: the embedded target's checkpoint.
        out_dir: the folder to write; one that is complete already is kept.
        device: where to compute; the GPU when there is one.

    Returns:
        ``out_dir``.

    Raises:
        PairError: the target is incomplete, or the shape is not wider.
    """
    from safetensors.torch import save_file

    if (out_dir / "config.json").is_file():
        return out_dir
    config, get = _config(target_dir), _Reader(target_dir)
    widener = _Widener(config, wide or WideShape(), *_setting(device, dtype))
    partial = _start(out_dir)
    index: dict[str, str] = {}

    def save(tensors: dict[str, Tensor]) -> None:
        file = f"model-{len(set(index.values())):05d}.safetensors"
        save_file({k: v.contiguous().cpu() for k, v in tensors.items()}, str(partial / file), metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))

    embedding = widener.zeros(config["vocab_size"], widener.wide.hidden)
    embedding[:, : widener.hidden] = widener.place(get("model.embed_tokens.weight"))
    save({"model.embed_tokens.weight": embedding, "model.norm.weight": widener.norm(get("model.norm.weight"))})
    del embedding
    for layer in range(config["num_hidden_layers"]):
        norms = ("input_layernorm", "post_attention_layernorm")
        save(dict(widener.layer(f"model.layers.{layer}.", get, norms)))
    listing = json.dumps({"metadata": {}, "weight_map": index}, indent=1)
    (partial / "model.safetensors.index.json").write_text(listing, encoding="utf-8")
    _finish(partial, out_dir, widener.config(config), target_dir)
    return out_dir


def build_head(
    head_dir: Path, out_dir: Path, wide: WideShape | None = None, *, dtype: str = "bfloat16", device: str | None = None
) -> Path:
    """Widen an EAGLE-3 head of the embedded target for the stand-in, in the same way.

    Args:
        head_dir: the head's checkpoint, as ``app.drafters.install.build`` makes it.

    Returns:
        ``out_dir``.

    Raises:
        PairError: the checkpoint is incomplete, or the shape is not wider.
    """
    from safetensors.torch import save_file

    if (out_dir / "config.json").is_file():
        return out_dir
    config, get = _config(head_dir), _Reader(head_dir)
    widener = _Widener(config, wide or WideShape(), *_setting(device, dtype))
    tensors: dict[str, Tensor] = {"d2t": get("d2t"), "norm.weight": widener.norm(get("norm.weight"))}
    combine = get("fc.weight")
    full = widener.zeros(widener.wide.hidden, 3 * widener.wide.hidden)
    full[: widener.hidden] = widener.columns("fc.weight", combine, widener.hidden, 3)
    tensors["fc.weight"] = full
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors |= dict(widener.layer("midlayer.", get, norms, 2))
    output = get("lm_head.weight")
    tensors["lm_head.weight"] = widener.columns("lm_head.weight", output, output.shape[0])
    partial = _start(out_dir)
    save_file(
        {k: v.contiguous().cpu() for k, v in tensors.items()},
        str(partial / "model.safetensors"),
        metadata={"format": "pt"},
    )
    _finish(partial, out_dir, widener.config(config), head_dir)
    return out_dir
