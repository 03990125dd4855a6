"""Drafting at every anchor of a row, once, and what follows from it: accuracy per slot and the walk.

Per-slot accuracy is defined over all eligible anchors, so every anchor is drafted anyway; the walk then only looks its
drafts up. Rows are packed back to back; the context's keys and values are computed once a pack, and blocks go through
the drafter in chunks, so memory depends on neither the number of rows nor their length.

Axes: R rows, T tokens of a pack, A anchors, B block, K context layers, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..drafter.draft import SlotCounts, block_states, head_chunks, pack_key_values, slot_counts, slot_tokens
from ..drafter.layout import PackLayout
from ..drafter.model import DFlashDrafter
from ..drafter.walk import RowWalk, WalkRow, eligible_anchors, walk_rows
from ..store import Row, TargetHead
from .ranks import common_tokens, token_ranks
from .trees import path_places, top_tokens

TOP_M = (1, 2, 4, 8)


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

    `top_m_walks` has for each m of TOP_M the walks that accept a token among the m first choices of its slot, and
    `tree_walks` for each budget those that accept the longest path of its tree. `on_policy` counts supervised tokens
    equal to the stored top-1 of the position before, out of `supervised`.
    """

    walks: list[RowWalk]
    slots: SlotCounts
    on_policy: int
    supervised: int
    top_m_walks: dict[int, list[RowWalk]]
    tree_walks: dict[int, list[RowWalk]]


def measure_pack(
    model: DFlashDrafter, head: FrozenHead, rows: Sequence[Row], tree_budgets: Sequence[int] = ()
) -> PackFigures:
    """Draft at all eligible anchors of the rows and compare with their own tokens.

    Args:
        model: the drafter, in evaluation mode.
        head: see `FrozenHead`.
        rows: with the states of the drafter's context layers and the top-1 ids.
        tree_budgets: of the trees to grow at every anchor; each needs the whole head at every slot.
    """
    tokens, loss_mask = torch.cat([row.tokens.long() for row in rows]), torch.cat([row.loss_mask for row in rows])
    offsets = torch.tensor([0, *np.cumsum([len(row.tokens) for row in rows]).tolist()])
    walk_inputs = [WalkRow.of(row.tokens.tolist(), row.loss_mask.tolist()) for row in rows]
    anchors = [eligible_anchors(row.runs) for row in walk_inputs]
    starts = offsets.tolist()
    pack_anchors = torch.tensor([starts[r] + a for r, mine in enumerate(anchors) for a in mine], dtype=torch.int64)
    layout = PackLayout(offsets, pack_anchors)
    wanted = slot_tokens(layout, model.config.block_size - 1, tokens, loss_mask)
    common, ranks, places = common_tokens(tokens), [], []
    for part, hidden in slot_states(model, head, rows, layout, tokens):
        ranks.append(token_ranks(hidden, wanted[part], head.weight, common))
        if tree_budgets:
            places.append(tree_places(hidden, wanted[part], head.weight, max(tree_budgets)))
    all_ranks = torch.cat(ranks) if ranks else wanted

    def walk_where(right: Tensor) -> list[RowWalk]:
        """Walk all rows with drafts that are right there: [A, B-1] bool."""
        lists = iter(torch.where(right, wanted, -1).tolist())
        return [
            walk_drafts(row, mine, [next(lists) for _ in mine]) for row, mine in zip(walk_inputs, anchors, strict=True)
        ]

    top_m_walks = {m: walk_where(all_ranks < m) for m in TOP_M}
    on_policy = sum(int((_supervised(row) & _is_top_1(row)).sum()) for row in rows)
    supervised = sum(int(_supervised(row).sum()) for row in rows)
    return PackFigures(
        walks=top_m_walks[1],
        slots=slot_counts(torch.where(all_ranks == 0, wanted, -1), layout, tokens, loss_mask),
        on_policy=on_policy,
        supervised=supervised,
        top_m_walks=top_m_walks,
        tree_walks={n: walk_where(torch.cat(places) < n if places else wanted < 0) for n in tree_budgets},
    )


@torch.inference_mode()
def slot_states(
    model: DFlashDrafter, head: FrozenHead, rows: Sequence[Row], layout: PackLayout, tokens: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the drafter's final states [n, B-1, H] of the slots after n anchors, with their place among the layout's.

    `tokens` [T] are the pack's ids; never more than a chunk of blocks exists at once.
    """
    layers = model.config.context_layer_ids
    states = torch.cat([torch.cat([row.states[layer] for layer in layers], dim=1) for row in rows])
    key_values = pack_key_values(model, states, layout.row_offsets)
    for part, hidden in block_states(model, head.embed_tokens, key_values, layout, tokens[layout.anchors]):
        yield part, hidden[:, 1:]


def tree_places(hidden: Tensor, wanted: Tensor, head_weight: Tensor, budget: int) -> Tensor:
    """Return [A, S] int64: where each prefix of the own tokens stands in its anchor's best-first tree, from 0 on.

    `budget` or more where it is not among so many nodes, or where nothing is wanted. hidden [A, S, H], wanted [A, S]
    with -1 for none.
    """
    num_anchors, num_slots = wanted.shape
    flat = hidden.flatten(0, 1)
    ids, values = [], []
    for _, logits in head_chunks(flat, head_weight):
        found, log_probabilities = top_tokens(logits, budget)
        ids.append(found.cpu())
        values.append(log_probabilities.cpu())
    all_ids = torch.cat(ids).view(num_anchors, num_slots, -1)
    all_values = torch.cat(values).view(num_anchors, num_slots, -1).tolist()
    equal = all_ids == wanted[..., None]
    ranks = torch.where(equal.any(-1), equal.int().argmax(-1), all_ids.shape[-1])
    places = torch.full(wanted.shape, budget)
    for anchor, (mine, own) in enumerate(zip(ranks.tolist(), wanted.tolist(), strict=True)):
        length = next((slot for slot, token in enumerate(own) if token < 0), num_slots)
        found_places = path_places(all_values[anchor], mine[:length], budget)
        places[anchor, : len(found_places)] = torch.tensor(found_places)
    return places


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
