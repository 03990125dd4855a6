"""The loss over the full vocabulary, without full logits: a linear head and its cross entropy, tile by tile.

The head is frozen, so the backward pass needs the gradient of the hidden states only. It is the mean of the head's rows
under the softmax, less the label's row: the softmax's mean over tiles of the vocabulary is merged by their log-sum-exp,
as attention merges keys, so a tile of logits lives in the cache of the processor from its product to the next one.

Axes: N supervised slots, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

TILE_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Logits of one tile. On a CPU they shall fit its cache: 480 slots of 576 against 49,152 rows took 0.355 s with tiles
of 2 to 8 MiB, 0.362 s with 32 MiB, and 0.410 s with whole rows in chunks of 47 MB (two cores, float32)."""
MIN_TILE_COLUMNS = 1024
"""Vocabulary of one tile at least: with fewer columns, fewer slots share a pass over the head."""
WHOLE_ROWS_BYTES = 64 << 20
"""Logits at once where the soft loss needs whole rows."""


def weighted_loss(
    hidden_NH: Tensor,
    head_VH: Tensor,
    labels_N: Tensor,
    weights_N: Tensor,
    *,
    teacher_NH: Tensor | None = None,
    kl_weight: float = 0.0,
    kl_temperature: float = 1.0,
    tile_bytes: int | None = None,
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
        tile_bytes: largest size of the logits that exist at once, but never less than one (a row of them, where
            kl_weight > 0); TILE_BYTES or WHOLE_ROWS_BYTES if None.

    Returns:
        The weighted sum (float32 scalar, differentiable in `hidden_NH`) and hits [N] bool: no logit was larger than
        the label's.
    """
    loss, hits = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden_NH, head_VH, labels_N, weights_N, teacher_NH, kl_weight, kl_temperature, tile_bytes
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
        tile_bytes: int | None,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32
        num_slots, num_columns = _tile_shape(len(hidden_NH), head_VH, tile_bytes, whole_rows=kl_weight > 0)
        grad_NH = torch.zeros_like(hidden_NH)
        hits_N = torch.zeros(len(hidden_NH), dtype=torch.bool, device=hidden_NH.device)
        total = torch.zeros((), dtype=wide, device=hidden_NH.device)
        buffer = head_VH.new_empty(num_slots * num_columns)
        for slots in _parts(len(hidden_NH), num_slots):
            hidden, labels, weights = hidden_NH[slots].to(head_VH.dtype), labels_N[slots, None], weights_N[slots, None]
            lse = torch.full((len(hidden), 1), -math.inf, dtype=wide, device=hidden.device)
            largest, label_logit = lse.clone(), lse.clone()
            mean = torch.zeros_like(hidden, dtype=wide)
            for columns in _parts(len(head_VH), num_columns):
                head = head_VH[columns]
                logits = buffer[: len(hidden) * len(head)].view(len(hidden), len(head))
                logits = torch.mm(hidden, head.T, out=logits).to(wide)
                tile_largest = logits.amax(1, keepdim=True)
                largest = torch.maximum(largest, tile_largest)
                places = labels - columns.start
                inside = (places >= 0) & (places < len(head))
                label_logit = logits.gather(1, places.clamp(0, len(head) - 1)).where(inside, label_logit)
                soft = None
                if kl_weight:  # one tile: all columns
                    assert teacher_NH is not None
                    teacher = (teacher_NH[slots].to(head.dtype) @ head.T).to(wide)
                    kl, soft = _soft_kl(logits, teacher, kl_temperature)
                    total += kl_weight * (weights * kl).sum()
                # in place, row by row in cache; the largest probability, at least 1/V, gives back the log of the sum
                probs = torch.softmax(logits, 1, out=logits)
                tile_lse = tile_largest - probs.amax(1, keepdim=True).log()
                if soft is not None:
                    probs.mul_(1 - kl_weight).add_(soft, alpha=kl_weight)
                tile_mean = (probs.to(head.dtype) @ head).to(wide)
                merged = torch.logaddexp(lse, tile_lse)
                mean.mul_((lse - merged).exp()).addcmul_(tile_mean, (tile_lse - merged).exp())
                lse = merged
            hits_N[slots] = (label_logit == largest).squeeze(1)
            total += (1 - kl_weight) * (weights * (lse - label_logit)).sum()
            # the gradient by the logits is probs minus one-hot, weighted: both are cheaper after the head than before
            grad = mean.sub_(head_VH[labels.squeeze(1)].to(wide), alpha=1 - kl_weight)
            grad_NH[slots] = grad.mul_(weights).to(grad_NH.dtype)
        ctx.save_for_backward(grad_NH)
        ctx.mark_non_differentiable(hits_N)
        return total, hits_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_NH,) = ctx.saved_tensors
        return (grad_NH * grads[0].to(grad_NH.dtype), *[None] * 7)


def _tile_shape(num_slots: int, head_VH: Tensor, tile_bytes: int | None, *, whole_rows: bool) -> tuple[int, int]:
    """Return the slots and the columns of the vocabulary whose logits exist at once."""
    vocab = len(head_VH)
    numbers = (tile_bytes or (WHOLE_ROWS_BYTES if whole_rows else TILE_BYTES[head_VH.device.type])) // 4
    slots = max(1, min(num_slots, numbers // (vocab if whole_rows else min(MIN_TILE_COLUMNS, vocab))))
    return slots, vocab if whole_rows else max(1, min(vocab, numbers // slots))


def _parts(length: int, size: int) -> Iterator[slice]:
    """Cut 0..length into parts of at most `size`, as equal as multiples of 16 allow."""
    count = max(1, math.ceil(length / size))
    size = max(1, min(size, math.ceil(length / count / 16) * 16))
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _soft_kl(logits: Tensor, teacher: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return T^2 * KL(teacher_T || drafter_T) per slot, [N, 1], and its gradient by the logits, [N, V]."""
    log_q = (logits / temperature).log_softmax(1)
    log_p = (teacher / temperature).log_softmax(1)
    p = log_p.exp()
    kl = temperature**2 * (p * (log_p - log_q)).sum(1, keepdim=True)
    return kl, log_q.exp_().sub_(p).mul_(temperature)
