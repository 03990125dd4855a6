"""The loss over the full vocabulary, without full logits: a linear head and its cross entropy, chunk by chunk.

The head is frozen, so the backward pass needs the gradient of the hidden states only; it is computed together with
the loss while a chunk's logits exist, and the logits are dropped. Peak memory: one chunk of logits in float32.

Axes: N supervised slots, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20
"""Logits of 336 slots at a vocabulary of 49,152. Fewer rows multiply more slowly: 12, 24, 48 and 64 MiB took 1.72,
1.40, 1.13 and 1.02 s for 960 slots of 576 (two cores, float32); 96 MiB was no faster."""


def weighted_loss(
    hidden_NH: Tensor,
    head_VH: Tensor,
    labels_N: Tensor,
    weights_N: Tensor,
    *,
    teacher_NH: Tensor | None = None,
    kl_weight: float = 0.0,
    kl_temperature: float = 1.0,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (sum of weight times loss, hits): hard cross entropy, or a mixture with soft KL to a teacher.

    The mixture of a slot is (1 - kl_weight) * CE + kl_weight * T^2 * KL(teacher_T || drafter_T) with both
    distributions softened by the temperature T, the usual scale of distillation (Hinton et al. 2015).

    Args:
        hidden_NH: the drafter's output after its final norm.
        head_VH: the target's head, not trained.
        labels_N: int64 in [0, V).
        weights_N: float32.
        teacher_NH: states that give the teacher's logits through the same head; needed when kl_weight > 0.
        kl_weight: share of the soft loss.
        kl_temperature: T.
        chunk_bytes: largest size of one chunk of logits, CHUNK_BYTES if None.

    Returns:
        The weighted sum (float32 scalar, differentiable in `hidden_NH`) and hits [N] bool: no logit was larger than
        the label's.
    """
    loss, hits = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden_NH, head_VH, labels_N, weights_N, teacher_NH, kl_weight, kl_temperature, chunk_bytes or CHUNK_BYTES
    )
    return loss, hits


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        head_VH: Tensor,
        labels_N: Tensor,
        weights_N: Tensor,
        teacher_NH: Tensor | None,
        kl_weight: float,
        kl_temperature: float,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        rows = chunk_bytes // (4 * len(head_VH))
        rows = max(1, rows // 16 * 16 or rows)
        num_chunks = max(1, math.ceil(len(hidden_NH) / rows))
        rows = max(1, math.ceil(len(hidden_NH) / num_chunks))  # equal chunks
        wide = torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32
        grad_NH = torch.zeros_like(hidden_NH)
        hits_N = torch.zeros(len(hidden_NH), dtype=torch.bool, device=hidden_NH.device)
        total = torch.zeros((), dtype=wide, device=hidden_NH.device)
        buffer = hidden_NH.new_empty((min(rows, len(hidden_NH)), len(head_VH)), dtype=head_VH.dtype)
        for start in range(0, len(hidden_NH), rows):
            part = slice(start, start + rows)
            logits = torch.mm(hidden_NH[part].to(head_VH.dtype), head_VH.T, out=buffer[: len(labels_N[part])]).to(wide)
            labels, weights = labels_N[part, None], weights_N[part, None].to(wide)
            largest, label_logit = logits.amax(1, keepdim=True), logits.gather(1, labels)
            hits_N[part] = (label_logit == largest).squeeze(1)
            soft = None
            if kl_weight:
                assert teacher_NH is not None
                teacher = (teacher_NH[part].to(head_VH.dtype) @ head_VH.T).to(wide)
                kl, soft = _soft_kl(logits, teacher, kl_temperature)
                total += kl_weight * (weights * kl).sum()
            # in place, row by row in cache; the largest probability, at least 1/V, gives back the log of the sum
            probs = torch.softmax(logits, 1, out=logits)
            lse = largest - probs.amax(1, keepdim=True).log()
            total += (1 - kl_weight) * (weights * (lse - label_logit)).sum()
            if soft is not None:
                probs.mul_(1 - kl_weight).add_(soft, alpha=kl_weight)
            # the gradient by the logits is probs minus one-hot, weighted: both are cheaper after the head than before
            grad = (probs.to(head_VH.dtype) @ head_VH).to(wide)
            grad.sub_(head_VH[labels.squeeze(1)].to(wide), alpha=1 - kl_weight)
            grad_NH[part] = grad.mul_(weights).to(grad_NH.dtype)
        ctx.save_for_backward(grad_NH)
        ctx.mark_non_differentiable(hits_N)
        return total, hits_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_NH,) = ctx.saved_tensors
        return (grad_NH * grads[0].to(grad_NH.dtype), *[None] * 7)


def _soft_kl(logits: Tensor, teacher: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return T^2 * KL(teacher_T || drafter_T) per slot, [N, 1], and its gradient by the logits, [N, V]."""
    log_q = (logits / temperature).log_softmax(1)
    log_p = (teacher / temperature).log_softmax(1)
    p = log_p.exp()
    kl = temperature**2 * (p * (log_p - log_q)).sum(1, keepdim=True)
    return kl, log_q.exp_().sub_(p).mul_(temperature)
