"""Held-out figures during training: the offline tau of some rows, and the accuracy of each slot.

A glance, not the verdict: few rows, and for the slots few anchors of each. `dflash evaluate` has the whole answer.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ..drafter.draft import SlotCounts, draft_blocks, pack_key_values, slot_counts, walk_pack
from ..drafter.layout import PackLayout
from ..drafter.model import DFlashDrafter
from ..drafter.walk import RowWalk, WalkRow, eligible_anchors, macro_tau, micro_tau
from ..store import CacheReader, TargetHead
from ..store.splits import split_rows
from .config import ResolvedConfig

ROWS_AT_ONCE = 8
ANCHORS_PER_ROW = 16


class HeldOut:
    """The held-out rows of a run, at most `eval_rows` of them, and their measurement."""

    def __init__(self, cache: CacheReader, config: ResolvedConfig, head: TargetHead) -> None:
        rows = split_rows(cache.prompt_hash, config.recipe.heldout_share, "heldout")
        rows = rows[cache.num_anchors[rows] > 0]
        self._rows = rows[: config.recipe.eval_rows]
        self._cache, self._config, self._head = cache, config, head

    @property
    def num_rows(self) -> int:
        """Rows that are measured; zero where the run holds none out."""
        return len(self._rows)

    def measure(self, model: DFlashDrafter) -> dict[str, Any]:
        """Return rows, verifications, tau {micro, macro} and slot_accuracy [B-1] of the model as it is."""
        walks: list[RowWalk] = []
        counts = []
        for start in range(0, len(self._rows), ROWS_AT_ONCE):
            part = self._measure_pack(model, self._rows[start : start + ROWS_AT_ONCE].tolist())
            walks += part[0]
            counts.append(part[1])
        total = sum(counts[1:], counts[0])
        return {
            "rows": len(walks),
            "verifications": sum(walk.verifications for walk in walks),
            "tau": {"micro": micro_tau(walks), "macro": macro_tau(walks)},
            "slot_accuracy": [None if math.isnan(value) else round(value, 4) for value in total.accuracy],
        }

    def _measure_pack(self, model: DFlashDrafter, numbers: list[int]) -> tuple[list[RowWalk], SlotCounts]:
        layers = self._config.drafter.context_layer_ids
        rows = [self._cache.read_row(number, layer_ids=layers, top_k=False) for number in numbers]
        device = self._head.embed_tokens.device
        states = torch.cat([torch.cat([row.states[layer] for layer in layers], 1) for row in rows]).float().to(device)
        offsets = torch.tensor([0, *np.cumsum([len(row.tokens) for row in rows]).tolist()])
        walk_rows = [WalkRow.of(row.tokens.tolist(), row.loss_mask.tolist()) for row in rows]
        head, embed = self._head.head_weight, self._head.embed_tokens
        key_values = pack_key_values(model, states, offsets)
        walks = walk_pack(model, head, embed, key_values, row_offsets=offsets, rows=walk_rows)
        anchors = []
        for start, row in zip(offsets.tolist(), walk_rows, strict=False):
            eligible = eligible_anchors(row.runs)
            stride = -(-len(eligible) // ANCHORS_PER_ROW)
            anchors += [start + anchor for anchor in eligible[::stride]]
        layout = PackLayout(offsets, torch.tensor(anchors))
        tokens = torch.cat([row.tokens for row in rows]).long()
        drafts = draft_blocks(model, head, embed, key_values, layout=layout, tokens=tokens)
        return walks, slot_counts(drafts, layout, tokens, torch.cat([row.loss_mask for row in rows]))
