"""Two Triton kernels for the GPU, each with the plain PyTorch that defines what it computes.

On the CPU, and where Triton is missing, the plain versions run.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # the CPU build of PyTorch comes without Triton on some machines
    triton = None


def decode_attention_plain(q: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """Attention of one new token per sequence over its cache.

    Args:
        q: queries ``[batch, heads, head_dim]``.
        keys: cache ``[batch, kv_heads, capacity, head_dim]``; ``values`` alike.
        pos: position of the new token ``[batch]``; positions 0 to ``pos`` are attended.

    Returns:
        ``[batch, heads, head_dim]`` in the dtype of ``q``.
    """
    batch, heads, dim = q.shape
    kv_heads, capacity = keys.shape[1], keys.shape[2]
    grouped = q.view(batch, kv_heads, heads // kv_heads, dim).float()
    scores = grouped @ keys.float().transpose(-1, -2) / math.sqrt(dim)
    hidden = torch.arange(capacity, device=q.device)[None, :] > pos[:, None]
    weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
    return (weights @ values.float()).view(batch, heads, dim).to(q.dtype)


def soft_cross_entropy_plain(
    logits: Tensor, probs: Tensor, best: Tensor, weight: Tensor, sharpen: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy against soft targets, its gradient, and the arg-max, row by row.

    The target distribution is ``(1 - sharpen) * probs + sharpen * onehot(best)``; a row with
    ``best`` < 0 uses ``probs`` alone.

    Args:
        logits: ``[rows, vocab]``.
        probs: the teacher's probabilities ``[rows, vocab]``, summing to 1.
        best: the teacher's arg-max ``[rows]``, -1 where it is outside the vocabulary.
        weight: weight of each row in the gradient ``[rows]``.

    Returns:
        Losses ``[rows]`` in fp32 nats (unweighted), the weighted gradient with respect to the
        logits in their dtype, and the arg-max of the logits ``[rows]``.
    """
    full = logits.float()
    log_z = full.logsumexp(-1)
    mix = torch.where(best >= 0, sharpen, 0.0)
    wanted = probs.float() * (1 - mix)[:, None]
    wanted.scatter_add_(1, best.clamp(min=0)[:, None], mix[:, None])
    loss = log_z - (wanted * full).sum(-1)
    gradient = ((full - log_z[:, None]).exp() - wanted) * weight[:, None]
    return loss, gradient.to(logits.dtype), full.argmax(-1)


if triton is not None:

    @triton.jit
    def _decode_attention(  # type: ignore[no-untyped-def]
        q, k, v, out, pos, stride_b, stride_h, scale,
        HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        b = tl.program_id(0).to(tl.int64)
        h = tl.program_id(1)
        n = tl.load(pos + b) + 1
        rows = tl.arange(0, 16)
        cols = tl.arange(0, DIM)
        at = b * HEADS * DIM + (h * GROUP + rows)[:, None] * DIM + cols[None, :]
        live = (rows < GROUP)[:, None]
        query = tl.load(q + at, mask=live, other=0.0)
        base = b * stride_b + h * stride_h
        top = tl.full([16], -1e30, tl.float32)
        total = tl.zeros([16], tl.float32)
        acc = tl.zeros([16, DIM], tl.float32)
        for start in range(0, n, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            inside = offs < n
            cell = base + offs[:, None] * DIM + cols[None, :]
            key = tl.load(k + cell, mask=inside[:, None], other=0.0)
            score = tl.dot(query, tl.trans(key)) * scale
            score = tl.where(inside[None, :], score, -1e30)
            new_top = tl.maximum(top, tl.max(score, 1))
            shrink = tl.exp(top - new_top)
            p = tl.exp(score - new_top[:, None])
            total = total * shrink + tl.sum(p, 1)
            value = tl.load(v + cell, mask=inside[:, None], other=0.0)
            acc = acc * shrink[:, None] + tl.dot(p.to(value.dtype), value)
            top = new_top
        tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=live)

    @triton.jit
    def _soft_cross_entropy(  # type: ignore[no-untyped-def]
        logits, probs, best, weight, loss, chosen, vocab, sharpen, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        x = logits + row * vocab
        p = probs + row * vocab
        aim = tl.load(best + row)
        w = tl.load(weight + row)
        mix = tl.where(aim >= 0, sharpen, 0.0)
        top = -1e30
        total = 0.0
        dot = 0.0
        arg = 0
        for start in range(0, vocab, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            inside = offs < vocab
            value = tl.load(x + offs, mask=inside, other=-1e30).to(tl.float32)
            wanted = tl.load(p + offs, mask=inside, other=0.0).to(tl.float32)
            here = tl.max(value, 0)
            first = tl.argmax(value, 0) + start
            arg = tl.where(here > top, first, arg)
            new_top = tl.maximum(top, here)
            total = total * tl.exp(top - new_top) + tl.sum(tl.where(inside, tl.exp(value - new_top), 0.0), 0)
            dot += tl.sum(tl.where(inside, wanted * value, 0.0), 0)
            top = new_top
        log_z = top + tl.log(total)
        picked = tl.load(x + tl.maximum(aim, 0)).to(tl.float32)
        tl.store(loss + row, log_z - (1 - mix) * dot - mix * picked)
        tl.store(chosen + row, arg)
        for start in range(0, vocab, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            inside = offs < vocab
            value = tl.load(x + offs, mask=inside, other=-1e30).to(tl.float32)
            wanted = tl.load(p + offs, mask=inside, other=0.0).to(tl.float32) * (1 - mix)
            wanted = tl.where(offs == aim, wanted + mix, wanted)
            gradient = (tl.exp(value - log_z) - wanted) * w
            tl.store(x + offs, gradient.to(logits.dtype.element_ty), mask=inside)


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """``decode_attention_plain``, by Triton on a GPU. ``q``, ``keys`` and ``values`` are contiguous there."""
    if triton is None or not q.is_cuda:
        return decode_attention_plain(q, keys, values, pos)
    return decode_attention_triton(q, keys, values, pos)


def decode_attention_triton(q: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    batch, heads, dim = q.shape
    kv_heads = keys.shape[1]
    out = torch.empty_like(q)
    kernel: Any = _decode_attention
    kernel[(batch, kv_heads)](
        q, keys, values, out, pos, keys.stride(0), keys.stride(1), 1 / math.sqrt(dim),
        HEADS=heads, GROUP=heads // kv_heads, DIM=dim, BLOCK=64, num_warps=4,
    )  # fmt: skip
    return out


def soft_cross_entropy(
    logits: Tensor, probs: Tensor, best: Tensor, weight: Tensor, sharpen: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``soft_cross_entropy_plain``, by Triton on a GPU. There the gradient overwrites ``logits``."""
    if triton is None or not logits.is_cuda:
        return soft_cross_entropy_plain(logits, probs, best, weight, sharpen)
    return soft_cross_entropy_triton(logits, probs, best, weight, sharpen)


def soft_cross_entropy_triton(
    logits: Tensor, probs: Tensor, best: Tensor, weight: Tensor, sharpen: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocab = logits.shape
    loss = torch.empty(rows, device=logits.device, dtype=torch.float32)
    chosen = torch.empty(rows, device=logits.device, dtype=torch.int64)
    kernel: Any = _soft_cross_entropy
    kernel[(rows,)](logits, probs, best, weight.float(), loss, chosen, vocab, float(sharpen), BLOCK=4096, num_warps=8)
    return loss, logits, chosen
