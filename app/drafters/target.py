"""The target as plain PyTorch.

vLLM serves the models; training needs what it does not give: hidden states of chosen layers for
whole batches, and a decode step that is fast for thousands of short sequences of a tiny model.
Only the Llama architecture with grouped-query attention, SiLU and no biases is covered.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from app.errors import PairError


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a Llama."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Shape:
        """Read the fields of a Hugging Face ``config.json``."""
        rope = config.get("rope_parameters") or {}
        return cls(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            eps=config["rms_norm_eps"],
            rope_theta=config.get("rope_theta") or rope.get("rope_theta", 10000.0),
        )


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's ``config.json``.

    Raises:
        PairError: there is none, or it is not a Llama's.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise PairError(f"{folder} holds no config.json. Build the target first, or name its folder.")
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if config.get("model_type") != "llama":
        raise PairError(f"{path} describes a {config.get('model_type')!r} model. The drafters fit a 'llama' target.")
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All weights of a checkpoint folder, by name, on the CPU in their stored dtype."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise PairError(f"{folder} holds no safetensors file. Build the target first, or name its folder.")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(load_file(str(file)))
    return tensors


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, computed in fp32, returned in the dtype of ``x``."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(x.dtype)


def rope_table(positions: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each ``[positions, head_dim]`` in fp32, for ``rotate``."""
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * inverse
    return torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in the half-split layout of Llama checkpoints."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return (x * cos + turned * sin).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Layer:
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    norm_in: Tensor
    norm_post: Tensor


class Target:
    """A frozen Llama with tied embeddings, on one device.

    ``embedding`` is ``[vocab, hidden]`` in the model's dtype.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, positions: int = 4096) -> None:
        self.config = read_config(folder)
        self.shape = shape = Shape.from_config(self.config)
        self.device, self.dtype = device, dtype
        weights = read_tensors(folder)

        def get(name: str) -> Tensor:
            return weights[name].to(device, dtype)

        self.embedding = get("model.embed_tokens.weight")
        self.norm = get("model.norm.weight")
        self.layers: list[Layer] = []
        for index in range(shape.layers):
            p = f"model.layers.{index}."
            self.layers.append(
                Layer(
                    qkv=torch.cat([get(f"{p}self_attn.{n}_proj.weight") for n in "qkv"]),
                    out=get(p + "self_attn.o_proj.weight"),
                    gate_up=torch.cat([get(p + "mlp.gate_proj.weight"), get(p + "mlp.up_proj.weight")]),
                    down=get(p + "mlp.down_proj.weight"),
                    norm_in=get(p + "input_layernorm.weight"),
                    norm_post=get(p + "post_attention_layernorm.weight"),
                )
            )
        self.cos, self.sin = rope_table(positions, shape.head_dim, shape.rope_theta, device)

    def logits(self, normed: Tensor) -> Tensor:
        """Logits ``[..., vocab]`` in fp32 for final hidden states that passed the last norm."""
        flat = normed.reshape(-1, self.shape.hidden)
        if flat.is_cuda and flat.dtype != torch.float32:
            # bf16 logits would tie neighbours that fp32 accumulation keeps apart
            out = torch.mm(flat, self.embedding.t(), out_dtype=torch.float32)
        else:
            out = F.linear(flat, self.embedding).float()
        return out.view(*normed.shape[:-1], self.shape.vocab)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = F.linear(F.rms_norm(x, (x.shape[-1],), layer.norm_post, self.shape.eps), layer.gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, layer.down)

    @torch.no_grad()
    def forward(
        self, ids: Tensor, aux: tuple[int, ...] = (), kv: list[tuple[Tensor, Tensor]] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run whole sequences, padded on the right.

        Args:
            ids: token ids ``[batch, length]``.
            aux: layers whose *inputs* are returned, as vLLM numbers them for EAGLE-3.
            kv: when given, every layer's keys and values ``[batch, kv_heads, length, head_dim]`` are appended.

        Returns:
            The auxiliary states side by side ``[batch, length, len(aux) * hidden]``, and the final
            hidden states after the last norm ``[batch, length, hidden]``.
        """
        s = self.shape
        batch, length = ids.shape
        cos, sin = self.cos[:length].to(self.dtype), self.sin[:length].to(self.dtype)
        x = F.embedding(ids, self.embedding)
        taken: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in aux:
                taken[index] = x
            qkv = F.linear(F.rms_norm(x, (s.hidden,), layer.norm_in, s.eps), layer.qkv)
            qkv = qkv.view(batch, length, s.heads + 2 * s.kv_heads, s.head_dim).transpose(1, 2)
            qk = rotate(qkv[:, : s.heads + s.kv_heads], cos, sin)
            q, k, v = qk[:, : s.heads], qk[:, s.heads :], qkv[:, s.heads + s.kv_heads :]
            if kv is not None:
                kv.append((k, v))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + F.linear(attended.transpose(1, 2).reshape(batch, length, -1), layer.out)
            x = x + self._mlp(layer, x)
        last = F.rms_norm(x, (s.hidden,), self.norm, s.eps)
        states = torch.cat([taken[i] for i in aux], -1) if aux else x.new_empty(batch, length, 0)
        return states, last

    @torch.no_grad()
    def decode(self, tokens: Tensor, pos: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One decode step for a batch of sequences, each at a position of its own.

        Args:
            tokens: the token to feed ``[batch]``.
            pos: its position ``[batch]``; its key and value are written there.
            keys: cache ``[layers, batch, kv_heads, capacity, head_dim]``; ``values`` alike.

        Returns:
            Logits ``[batch, vocab]`` in fp32.
        """
        from app.drafters.kernels import decode_attention

        s = self.shape
        batch = tokens.shape[0]
        rows = torch.arange(batch, device=tokens.device)
        cos = self.cos[pos][:, None].to(self.dtype)
        sin = self.sin[pos][:, None].to(self.dtype)
        x = F.embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            qkv = F.linear(F.rms_norm(x, (s.hidden,), layer.norm_in, s.eps), layer.qkv)
            qkv = qkv.view(batch, s.heads + 2 * s.kv_heads, s.head_dim)
            qk = rotate(qkv[:, : s.heads + s.kv_heads], cos, sin)
            keys[index, rows, :, pos] = qk[:, s.heads :]
            values[index, rows, :, pos] = qkv[:, s.heads + s.kv_heads :]
            attended = decode_attention(qk[:, : s.heads].contiguous(), keys[index], values[index], pos)
            x = x + F.linear(attended.view(batch, -1), layer.out)
            x = x + self._mlp(layer, x)
        return self.logits(F.rms_norm(x, (s.hidden,), self.norm, s.eps))
