"""The figures of a drafter over rows of a cache: read pack by pack, measured, added up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..drafter.draft import SlotCounts
from ..drafter.model import DFlashDrafter
from ..drafter.walk import RowWalk, micro_tau
from ..store import CacheReader, Row
from .baselines import TokenRow
from .figures import walk_figures
from .measure import TOP_M, FrozenHead, PackFigures, measure_pack

ON_POLICY_BAR = 0.97
PACK_TOKENS = 8192
REPORT_SECONDS = 10.0

Say = Callable[[str], None]
Observer = Callable[[Sequence[Row], PackFigures], None]
"""Sees each pack and what it yielded."""


@dataclass(frozen=True, eq=False)
class Figures:
    """What all packs together yield."""

    rows: list[TokenRow]
    top_m_walks: dict[int, list[RowWalk]]
    tree_walks: dict[int, list[RowWalk]]
    slots: SlotCounts
    on_policy: int
    supervised: int

    @property
    def walks(self) -> list[RowWalk]:
        """Of the chain of first choices."""
        return self.top_m_walks[1]

    def summary(self, block_size: int) -> dict[str, Any]:
        """Return the figures as JSON values."""
        share = self.on_policy / self.supervised
        return {
            **walk_figures(self.walks, block_size),
            "per_slot_accuracy": [None if math.isnan(value) else value for value in self.slots.accuracy],
            "on_policy_share": share,
            "estimate": share < ON_POLICY_BAR,
            "top_m_tau": {str(m): micro_tau(walks) for m, walks in self.top_m_walks.items()},
            "tree": {str(budget): walk_figures(walks, block_size) for budget, walks in self.tree_walks.items()},
        }


def measure_rows(
    model: DFlashDrafter,
    head: FrozenHead,
    cache: CacheReader,
    rows: NDArray[np.int64],
    say: Say,
    observers: Sequence[Observer],
    tree_budgets: Sequence[int] = (),
) -> Figures:
    """Measure pack by pack; every observer sees each pack and what it yielded."""
    zeros = torch.zeros(model.config.block_size - 1, dtype=torch.int64)
    token_rows: list[TokenRow] = []
    top_m_walks: dict[int, list[RowWalk]] = {m: [] for m in TOP_M}
    tree_walks: dict[int, list[RowWalk]] = {budget: [] for budget in tree_budgets}
    slots, on_policy, supervised = SlotCounts(zeros, zeros), 0, 0
    started = spoke = time.perf_counter()
    for indices, pack in _packs(cache, rows, model.config.context_layer_ids):
        found = measure_pack(model, head, pack, tree_budgets)
        for observe in observers:
            observe(pack, found)
        for all_walks, new in ((top_m_walks, found.top_m_walks), (tree_walks, found.tree_walks)):
            for key, walks in new.items():
                all_walks[key] += walks
        slots, on_policy, supervised = slots + found.slots, on_policy + found.on_policy, supervised + found.supervised
        for index, row in zip(indices, pack, strict=True):
            token_rows.append(TokenRow.of(row, int(cache.prompt_hash[index])))
        if time.perf_counter() - spoke > REPORT_SECONDS:
            spoke = time.perf_counter()
            say(_progress_line(len(token_rows), len(rows), spoke - started))
    return Figures(token_rows, top_m_walks, tree_walks, slots, on_policy, supervised)


def _packs(
    cache: CacheReader, rows: NDArray[np.int64], layer_ids: tuple[int, ...]
) -> Iterator[tuple[list[int], list[Row]]]:
    """Yield row indices and rows, shard by shard, at most PACK_TOKENS tokens at once (or one longer row)."""
    pack: list[int] = []
    for index in [*rows.tolist(), None]:
        full = pack and (
            index is None
            or cache.row_shard[index] != cache.row_shard[pack[0]]
            or cache.num_tokens[[*pack, index]].sum() > PACK_TOKENS
        )
        if full:
            yield pack, cache.read_shard(int(cache.row_shard[pack[0]]), layer_ids=layer_ids, rows=pack)
            pack = []
        if index is not None:
            pack.append(index)


def _progress_line(done: int, total: int, elapsed: float) -> str:
    left = int((total - done) * elapsed / done)
    return f"{done:,}/{total:,} rows  {done / elapsed:.1f} rows/s  {left // 60}:{left % 60:02d} left"
