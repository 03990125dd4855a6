"""Drafting at every anchor of a row, once, and what follows from it: accuracy per slot and the walk.

Per-slot accuracy is defined over all eligible anchors, so every anchor is drafted anyway; the walk then only looks its
drafts up. Rows are packed back to back; the context's keys and values are computed once a pack, and blocks go through
the drafter in chunks, so memory depends on neither the number of rows nor their length.

Axes: R rows, T tokens of a pack, A anchors, B block, K context layers, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..drafter.draft import CHUNK_BLOCK_TOKENS, SlotCounts, argmax_tokens, block_inputs, slot_counts
from ..drafter.layout import PackLayout
from ..drafter.model import DFlashDrafter
from ..drafter.walk import RowWalk, WalkRow, eligible_anchors, walk_rows
from ..store import Row, TargetHead


@dataclass(frozen=True, eq=False)
class FrozenHead:
    """The target's embeddings and head where the drafter is: [V, H] each, the head in the drafter's dtype."""

    embed_tokens: Tensor
    weight: Tensor

    @classmethod
    def of(cls, head: TargetHead, like: Tensor) -> FrozenHead:
        """Return the head on the device of `like`, and its output weights in the dtype of `like`."""
        weight = head.head_weight.to(like)
        embed_tokens = weight if head.lm_head is None else head.embed_tokens.to(like.device)
        return cls(embed_tokens, weight)


@dataclass(frozen=True, eq=False)
class PackFigures:
    """What one pack of rows yields: the walk of each row, the slots of all its anchors, and on-policy tokens.

    `on_policy` counts supervised tokens equal to the stored top-1 of the position before, out of `supervised`.
    """

    walks: list[RowWalk]
    slots: SlotCounts
    on_policy: int
    supervised: int


def measure_pack(model: DFlashDrafter, head: FrozenHead, rows: Sequence[Row]) -> PackFigures:
    """Draft at all eligible anchors of the rows and compare with their own tokens.

    Args:
        model: the drafter, in evaluation mode.
        head: see `FrozenHead`.
        rows: with the states of the drafter's context layers and the top-1 ids.
    """
    tokens, loss_mask = torch.cat([row.tokens.long() for row in rows]), torch.cat([row.loss_mask for row in rows])
    offsets = torch.tensor([0, *np.cumsum([len(row.tokens) for row in rows]).tolist()])
    walk_inputs = [WalkRow.of(row.tokens.tolist(), row.loss_mask.tolist()) for row in rows]
    anchors = [eligible_anchors(row.runs) for row in walk_inputs]
    starts = offsets.tolist()
    pack_anchors = torch.tensor([starts[r] + a for r, mine in enumerate(anchors) for a in mine], dtype=torch.int64)
    layout = PackLayout(offsets, pack_anchors)
    drafts = draft_at(model, head, rows, layout, tokens)
    ends = np.cumsum([0, *(len(mine) for mine in anchors)]).tolist()
    lists = drafts.tolist()
    walks = [
        walk_drafts(row, anchors[index], lists[ends[index] : ends[index + 1]]) for index, row in enumerate(walk_inputs)
    ]
    on_policy = sum(int((_supervised(row) & _is_top_1(row)).sum()) for row in rows)
    supervised = sum(int(_supervised(row).sum()) for row in rows)
    return PackFigures(walks, slot_counts(drafts, layout, tokens, loss_mask), on_policy, supervised)


@torch.inference_mode()
def draft_at(model: DFlashDrafter, head: FrozenHead, rows: Sequence[Row], layout: PackLayout, tokens: Tensor) -> Tensor:
    """Return the greedy drafts [A, B-1] int64 at the layout's anchors, on the CPU.

    `tokens` [T] are the pack's ids; never more than a chunk of blocks or of logits exists at once.
    """
    config, like = model.config, model.fc.weight
    states = torch.cat([torch.cat([row.states[layer] for layer in config.context_layer_ids], dim=1) for row in rows])
    key_values = model.context_key_values(model.context_features(states.to(like)), layout.positions)
    per_chunk = max(1, CHUNK_BLOCK_TOKENS // config.block_size)
    drafts = []
    for first in range(0, layout.num_anchors, per_chunk):
        part = slice(first, first + per_chunk)
        anchors = layout.anchors[part]
        chunk = PackLayout(layout.row_offsets, anchors, layout.rows[part])
        embeds = block_inputs(head.embed_tokens, tokens[anchors], config.mask_token_id, config.block_size).to(like)
        hidden = model.blocks(embeds, key_values, chunk).view(len(anchors), config.block_size, -1)[:, 1:]
        drafts.append(argmax_tokens(hidden.flatten(0, 1), head.weight).view(hidden.shape[:2]).cpu())
    return torch.cat(drafts) if drafts else torch.empty((0, config.block_size - 1), dtype=torch.int64)


def walk_drafts(row: WalkRow, anchors: Sequence[int], drafts: Sequence[Sequence[int]]) -> RowWalk:
    """Walk one row whose drafts [A, B-1] at all its eligible anchors are known."""
    place = {anchor: index for index, anchor in enumerate(anchors)}
    return walk_rows(lambda pairs: [drafts[place[anchor]] for _, anchor in pairs], [row])[0]


def _supervised(row: Row) -> NDArray[np.bool_]:
    """Return [T-1]: true where the token after a position is supervised."""
    mask: NDArray[np.bool_] = row.loss_mask[1:].numpy()
    return mask


def _is_top_1(row: Row) -> NDArray[np.bool_]:
    """Return [T-1]: true where the token after a position is the target's most likely one."""
    equal: NDArray[np.bool_] = (row.tokens[1:] == row.top_ids[:-1, 0]).numpy()
    return equal
