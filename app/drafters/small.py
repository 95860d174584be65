"""The stand-alone draft model: a Llama of few layers with the target's tokenizer and full vocabulary.

Its embedding is mostly the target's: ``E = E_target @ projection + correction``, where the
correction exists for the most frequent tokens only. So the largest matrix of the model is rebuilt
from the target and hardly takes room in the shipped file, and rare tokens keep sensible rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.drafters.target import Shape, Target, rms_norm, rope_table, rotate

LAYER_NAMES = {
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "norm_in": "input_layernorm.weight",
    "norm_post": "post_attention_layernorm.weight",
}


@dataclass(frozen=True, slots=True)
class SmallSize:
    """Dimensions of the draft model. With these and 49,152 tokens: 14.94 M parameters, 9.0 times
    fewer than the target's 134.5 M; 12.6 M of them are the embedding."""

    hidden: int = 256
    intermediate: int = 768
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64

    def config(self, target: dict[str, Any]) -> dict[str, Any]:
        """The ``config.json`` of the draft model beside a target with the config given."""
        return dict(
            target,
            architectures=["LlamaForCausalLM"],
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            tie_word_embeddings=True,
        )


class SmallLlama(nn.Module):
    """``frequent`` ``[count]`` are the token ids with a correction of their own."""

    frequent: Tensor
    base: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, frequent: Tensor, target_embedding: Tensor, positions: int = 4096) -> None:
        super().__init__()
        self.shape = shape
        h, d = shape.hidden, shape.head_dim

        def matrix(rows: int, cols: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, cols) * scale * cols**-0.5)

        self.layers = nn.ModuleList()
        calm = (2 * shape.layers) ** -0.5
        for _ in range(shape.layers):
            layer = nn.Module()
            layer.q, layer.k = matrix(shape.heads * d, h), matrix(shape.kv_heads * d, h)
            layer.v, layer.o = matrix(shape.kv_heads * d, h), matrix(h, shape.heads * d, calm)
            layer.gate, layer.up = matrix(shape.intermediate, h), matrix(shape.intermediate, h)
            layer.down = matrix(h, shape.intermediate, calm)
            layer.norm_in, layer.norm_post = nn.Parameter(torch.ones(h)), nn.Parameter(torch.ones(h))
            self.layers.append(layer)
        self.norm = nn.Parameter(torch.ones(h))
        self.projection = matrix(target_embedding.shape[1], h)
        self.correction = nn.Parameter(torch.zeros(len(frequent), h))
        self.register_buffer("frequent", frequent, persistent=False)
        self.register_buffer("base", target_embedding, persistent=False)
        cos, sin = rope_table(positions, d, shape.rope_theta, frequent.device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @torch.no_grad()
    def start_from(self, target: Target) -> None:
        """Begin with the projection that keeps most of the target embedding's inner products (its SVD)."""
        weights = target.embedding.float()
        _, vectors = torch.linalg.eigh(weights.t() @ weights)
        projection = vectors[:, -self.shape.hidden :].flip(-1)
        # the sign of an eigenvector is the library's choice: fix it, for the same start everywhere
        self.projection.copy_(projection * projection.sum(0).sign())

    def embedding(self) -> Tensor:
        """The tied embedding ``[vocab, hidden]``, from the target's."""
        full = self.base.to(self.projection.dtype) @ self.projection
        return full.index_add(0, self.frequent, self.correction)

    def forward(self, ids: Tensor, embedding: Tensor, dtype: torch.dtype) -> Tensor:
        """Final hidden states after the last norm ``[batch, length, hidden]``."""
        s = self.shape
        batch, length = ids.shape
        x = F.embedding(ids, embedding).to(dtype)
        cos, sin = self.cos[:length], self.sin[:length]
        group = s.heads // s.kv_heads
        for layer in self.layers:
            y = rms_norm(x, layer.norm_in, s.eps)

            def heads(weight: Tensor, count: int, y: Tensor = y) -> Tensor:
                return F.linear(y, weight.to(dtype)).view(batch, length, count, s.head_dim).transpose(1, 2)

            q, k = rotate(heads(layer.q, s.heads), cos, sin), rotate(heads(layer.k, s.kv_heads), cos, sin)
            v = heads(layer.v, s.kv_heads)
            attended = F.scaled_dot_product_attention(
                q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=True
            )
            x = x + F.linear(attended.transpose(1, 2).reshape(batch, length, -1), layer.o.to(dtype))
            y = rms_norm(x, layer.norm_post, s.eps)
            inner = F.silu(F.linear(y, layer.gate.to(dtype))) * F.linear(y, layer.up.to(dtype))
            x = x + F.linear(inner, layer.down.to(dtype))
        return rms_norm(x, self.norm, s.eps)
