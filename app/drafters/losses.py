"""The distillation loss, fused with the output layer that it follows.

The logits of a batch are the largest tensor of training. Here they live only inside the forward
pass, which already computes the gradient (cross-entropy's is ``softmax - target``): the logits'
memory is reused for it, and what is kept is the small product with the layer's weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from app.drafters.kernels import soft_cross_entropy


class _LinearSoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, probs: Tensor, best: Tensor, row_weight: Tensor, sharpen: float
    ) -> tuple[Tensor, Tensor]:
        matrix = weight.to(hidden.dtype)
        logits = hidden @ matrix.t()
        losses, gradient, chosen = soft_cross_entropy(logits, probs, best, row_weight, sharpen)
        ctx.save_for_backward(gradient @ matrix, (gradient.t() @ hidden).to(weight.dtype))
        ctx.mark_non_differentiable(chosen)
        return (losses * row_weight).sum(), chosen

    @staticmethod
    def backward(ctx: Any, scale: Tensor, _chosen: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return (
            hidden_grad * scale.to(hidden_grad.dtype),
            weight_grad * scale.to(weight_grad.dtype),
            None,
            None,
            None,
            None,
        )


def distillation_loss(
    hidden: Tensor, weight: Tensor, probs: Tensor, best: Tensor, row_weight: Tensor, sharpen: float
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of ``softmax(hidden @ weight.T)`` against the teacher's distribution.

    Args:
        hidden: ``[rows, hidden]``; its dtype is the one of the products.
        weight: output layer ``[vocab, hidden]``.
        probs: the teacher's probabilities ``[rows, vocab]``.
        best: the teacher's arg-max ``[rows]``, or -1.
        row_weight: weights of the rows ``[rows]``; make them sum to 1 for a mean.
        sharpen: share of the target that goes to ``best`` alone. Greedy verification accepts only
            the arg-max, so a small student does well to spend capacity on it.

    Returns:
        The weighted sum of the rows' losses in nats, and the student's arg-max ``[rows]``.
    """
    result: tuple[Tensor, Tensor] = _LinearSoftCrossEntropy.apply(hidden, weight, probs, best, row_weight, sharpen)
    return result
