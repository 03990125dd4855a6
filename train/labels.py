"""What each slot of each block is asked to say, and with what weight (DESIGN, Definitions).

Axes: A anchors, B block, T tokens of the pack, S = B - 1 supervised slots; slot k stands at column k - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Supervision:
    """Labels and weights of a pack's blocks.

    `slots_N2` [N, 2] int64 (anchor number, k) of every supervised slot, in order; `labels_N` [N] int64;
    `weights_N` [N] float32, exp(-(k - 1) / gamma); `sources_N` [N] int64: the position whose next token the slot is,
    a + k - 1, where the label state stands.
    """

    slots_N2: Tensor
    labels_N: Tensor
    weights_N: Tensor
    sources_N: Tensor


def eligible_positions(loss_mask_T: Tensor) -> Tensor:
    """Return the positions a of one row with loss_mask[a] and loss_mask[a + 1], int64."""
    return torch.nonzero(loss_mask_T[:-1] & loss_mask_T[1:]).flatten()


def supervised_slots(anchors_A: Tensor, row_end_A: Tensor, loss_mask_T: Tensor, block_size: int) -> Tensor:
    """Return [A, S] bool: the slot's token exists in the row and no hole of the mask lies before it.

    Args:
        anchors_A: [A] int64 positions in the pack.
        row_end_A: [A] int64, one past the last position of each anchor's row.
        loss_mask_T: [T] bool.
        block_size: B.
    """
    positions_AS = anchors_A[:, None] + torch.arange(1, block_size)
    inside_AS = positions_AS < row_end_A[:, None]
    masked_AS = loss_mask_T[positions_AS.clamp(max=len(loss_mask_T) - 1)] & inside_AS
    return masked_AS.long().cumprod(1).bool()


def cut_after_divergence(valid_AS: Tensor, corpus_AS: Tensor, target_AS: Tensor) -> Tensor:
    """Return [A, S] bool: `valid_AS` without the slots after the first where corpus and target differ."""
    agree_AS = (corpus_AS == target_AS).long()
    reached_AS = torch.cat([torch.ones_like(agree_AS[:, :1]), agree_AS[:, :-1]], 1).cumprod(1).bool()
    return valid_AS & reached_AS


def supervise(
    *,
    tokens_T: Tensor,
    loss_mask_T: Tensor,
    anchors_A: Tensor,
    row_end_A: Tensor,
    target_T: Tensor | None,
    block_size: int,
    gamma: float,
) -> Supervision:
    """Return the supervised slots of a pack, labelled by the corpus, or by the target where `target_T` is given.

    Args:
        tokens_T: [T] int64 tokens of the pack.
        loss_mask_T: [T] bool.
        anchors_A: [A] int64 positions in the pack.
        row_end_A: [A] int64 ends of the anchors' rows.
        target_T: [T] int64, the target's most likely next token after each position, for `target` labels.
        block_size: B.
        gamma: decay of the weights over the slots.
    """
    valid_AS = supervised_slots(anchors_A, row_end_A, loss_mask_T, block_size)
    slots_S = torch.arange(1, block_size)
    last = len(tokens_T) - 1
    corpus_AS = tokens_T[(anchors_A[:, None] + slots_S).clamp(max=last)]
    labels_AS = corpus_AS
    if target_T is not None:
        labels_AS = target_T[(anchors_A[:, None] + slots_S - 1).clamp(max=last)]
        valid_AS = cut_after_divergence(valid_AS, corpus_AS, labels_AS)
    slots_N2 = torch.nonzero(valid_AS)
    weights_S = torch.exp(-(slots_S - 1).float() / gamma)
    return Supervision(
        slots_N2=torch.stack([slots_N2[:, 0], slots_N2[:, 1] + 1], 1),
        labels_N=labels_AS[valid_AS],
        weights_N=weights_S[slots_N2[:, 1]],
        sources_N=anchors_A[slots_N2[:, 0]] + slots_N2[:, 1],
    )
