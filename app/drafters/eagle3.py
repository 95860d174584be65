"""The EAGLE-3 head: one decoder layer that continues the target's hidden states.

At position ``i`` the head sees three of the target's hidden states for token ``i`` and the
embedding of token ``i + 1``; it predicts token ``i + 2``. Drafting further, it takes its own output
in place of the target's states. Training runs these further steps as well ("training-time test",
Li et al., EAGLE-3, arXiv 2503.01840), so the head learns to live with its own errors.

The arithmetic is that of vLLM's ``llama_eagle3.py``: residual taken before ``hidden_norm``, the
un-normalized output fed back, positions of the target's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.drafters.losses import distillation_loss
from app.drafters.target import Shape, Target, rms_norm, rope_table, rotate

# names in the checkpoint that vLLM loads, by parameter
CHECKPOINT_NAMES = {
    "fc": "fc.weight",
    "q": "midlayer.self_attn.q_proj.weight",
    "k": "midlayer.self_attn.k_proj.weight",
    "v": "midlayer.self_attn.v_proj.weight",
    "o": "midlayer.self_attn.o_proj.weight",
    "gate": "midlayer.mlp.gate_proj.weight",
    "up": "midlayer.mlp.up_proj.weight",
    "down": "midlayer.mlp.down_proj.weight",
    "norm_embed": "midlayer.input_layernorm.weight",
    "norm_hidden": "midlayer.hidden_norm.weight",
    "norm_post": "midlayer.post_attention_layernorm.weight",
    "norm": "norm.weight",
}


def default_aux_layers(layers: int) -> tuple[int, int, int]:
    """The layers whose inputs vLLM hands to an EAGLE-3 head unless its config names others."""
    return 2, layers // 2, layers - 3


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the loss is taken, the same for all drafting steps.

    ``at`` are flat places ``batch * length`` of the teacher's predictions; ``next_ids`` the tokens
    that really followed; ``probs`` ``[rows, draft vocab]`` and ``best`` ``[rows]`` the teacher's.
    """

    at: Tensor
    next_ids: Tensor
    probs: Tensor
    best: Tensor


class Eagle3Head(nn.Module):
    """``kept`` ``[draft vocab]`` are the target's token ids that the head can draft, in its own order."""

    kept: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, kept: Tensor, positions: int = 4096) -> None:
        super().__init__()
        self.shape = shape
        h, d = shape.hidden, shape.head_dim

        def matrix(rows: int, cols: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, cols) * 0.02)

        self.fc = matrix(h, 3 * h)
        self.q, self.k, self.v = (
            matrix(shape.heads * d, 2 * h), matrix(shape.kv_heads * d, 2 * h), matrix(shape.kv_heads * d, 2 * h)
        )  # fmt: skip
        self.o = matrix(h, shape.heads * d)
        self.gate, self.up = matrix(shape.intermediate, h), matrix(shape.intermediate, h)
        self.down = matrix(h, shape.intermediate)
        for name in ("norm_embed", "norm_hidden", "norm_post", "norm"):
            self.register_parameter(name, nn.Parameter(torch.ones(h)))
        self.lm_head = matrix(len(kept), h)
        self.register_buffer("kept", kept, persistent=False)
        cos, sin = rope_table(positions, d, shape.rope_theta, kept.device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @torch.no_grad()
    def start_from(self, target: Target) -> None:
        """Begin as the target's last layer on its deepest auxiliary state, with the target's output rows."""
        s, last = self.shape, target.layers[-1]
        h = s.hidden
        self.fc.mul_(0.25)
        self.fc[:, 2 * h :] += torch.eye(h, device=self.fc.device)
        queries, keys = s.heads * s.head_dim, s.kv_heads * s.head_dim
        for own, part in ((self.q, last.qkv[:queries]), (self.k, last.qkv[queries : queries + keys]),
                          (self.v, last.qkv[queries + keys :])):  # fmt: skip
            own[:, h:].copy_(part)
        self.o.copy_(last.out)
        gate, up = last.gate_up.chunk(2)
        self.gate.copy_(gate)
        self.up.copy_(up)
        self.down.copy_(last.down)
        self.norm_hidden.copy_(last.norm_in)
        self.norm_post.copy_(last.norm_post)
        self.norm.copy_(target.norm)
        self.lm_head.copy_(target.embedding[self.kept])

    def combine(self, aux: Tensor) -> Tensor:
        """The target's three states ``[..., 3 * hidden]`` as one ``[..., hidden]``."""
        return F.linear(aux, self.fc.to(aux.dtype))

    def layer(
        self, embedded: Tensor, hidden: Tensor, step: int, cache: list[tuple[Tensor, Tensor]], mask: Tensor
    ) -> Tensor:
        """Drafting step ``step`` at all positions at once; appends to ``cache``.

        ``mask`` ``[length, (step + 1) * length]`` is True where a key may be seen: the keys of step 0
        causally, those of each later step only at the query's own position.

        Returns:
            The layer's un-normalized output ``[batch, length, hidden]``.
        """
        s = self.shape
        batch, length, _ = hidden.shape
        x = torch.cat([rms_norm(embedded, self.norm_embed, s.eps), rms_norm(hidden, self.norm_hidden, s.eps)], -1)
        cos, sin = self.cos[step : step + length], self.sin[step : step + length]

        def heads(weight: Tensor, count: int) -> Tensor:
            return F.linear(x, weight.to(x.dtype)).view(batch, length, count, s.head_dim).transpose(1, 2)

        group = s.heads // s.kv_heads
        q = rotate(heads(self.q, s.heads), cos, sin)
        key = rotate(heads(self.k, s.kv_heads), cos, sin).repeat_interleave(group, 1)
        value = heads(self.v, s.kv_heads).repeat_interleave(group, 1)
        cache.append((key, value))
        keys, values = (torch.cat([pair[n] for pair in cache], 2) for n in (0, 1))
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        hidden = hidden + F.linear(attended.transpose(1, 2).reshape(batch, length, -1), self.o.to(x.dtype))
        y = rms_norm(hidden, self.norm_post, s.eps)
        inner = F.silu(F.linear(y, self.gate.to(y.dtype))) * F.linear(y, self.up.to(y.dtype))
        return hidden + F.linear(inner, self.down.to(y.dtype))

    def draft(
        self, aux: Tensor, ids: Tensor, embedding: Tensor, rows: Rows, steps: int, *,
        decay: float = 0.85, strayed: float = 0.25, sharpen: float = 0.3,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Loss over ``steps`` drafting steps, and how far each draft would have been accepted.

        A step counts ``decay ** step``; a place where an earlier step of the same draft already missed
        the text counts ``strayed`` of a place where it did not, since such a draft is rejected anyway.

        Returns:
            The loss in nats, and for each step whether the draft that ends at each row matched the
            text up to and including this step ``[rows]``.
        """
        batch, length = ids.shape
        hidden = self.combine(aux)
        alive = torch.ones(batch * length, device=ids.device, dtype=torch.bool)
        causal = torch.ones(length, length, device=ids.device, dtype=torch.bool).tril()
        diagonal = torch.eye(length, device=ids.device, dtype=torch.bool)
        cache: list[tuple[Tensor, Tensor]] = []
        total = hidden.new_zeros((), dtype=torch.float32)
        accepted: list[Tensor] = []
        for step in range(steps):
            tokens = F.pad(ids[:, 1 + step :], (0, 1 + step))
            mask = torch.cat([causal, *[diagonal] * step], -1)
            hidden = self.layer(F.embedding(tokens, embedding), hidden, step, cache, mask)
            begun = rows.at - 1 - step
            normed = rms_norm(hidden.reshape(batch * length, -1)[begun], self.norm, self.shape.eps)
            weight = torch.where(alive[begun], 1.0, strayed)
            weight = weight / weight.sum().clamp(min=1)
            loss, chosen = distillation_loss(normed, self.lm_head, rows.probs, rows.best, weight, sharpen)
            total = total + decay**step * loss
            alive[begun] &= self.kept[chosen] == rows.next_ids
            accepted.append(alive[begun])
        return total, accepted
