"""Which rows go into which pack, and which anchors each row gets: a pure function of (seed, epoch) and the row table.

A pack is one training step's worth of whole rows, back to back. Rows come from a window of shards at a time, so that
a trainer streams the cache; the plan of an extraction has already spread the corpus over the shards at random.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
LOOKAHEAD_ROWS = 128


@dataclass(frozen=True, kw_only=True)
class RowTable:
    """The rows a run trains on. All arrays are [R] int64; `index` is the row's number in the cache."""

    index: IntArray
    num_tokens: IntArray
    num_anchors: IntArray
    shard: IntArray

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.index)


@dataclass(frozen=True, kw_only=True)
class PackSpec:
    """The rows of one pack (numbers in the cache) and how many anchors each is granted."""

    epoch: int
    rows: tuple[int, ...]
    quotas: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Window:
    """Some shards that are held together, and the packs made of their rows."""

    shards: tuple[int, ...]
    packs: tuple[PackSpec, ...]


def plan_windows(
    table: RowTable,
    *,
    seed: int,
    pack_tokens: int,
    anchors_per_pack: int,
    shuffle_tokens: int,
    stream: int = 0,
    num_streams: int = 1,
) -> Iterator[Window]:
    """Yield windows for ever, epoch after epoch.

    A row longer than `pack_tokens` gets a pack of its own. Within a window the rows are shuffled, and each pack takes
    the longest row that still fits out of the next `LOOKAHEAD_ROWS`. The shards of an epoch are dealt to
    `num_streams` streams, each a sequence of packs of its own; a step takes the next pack of every stream.

    Args:
        table: the training rows, every one with at least one anchor.
        seed: of the run.
        pack_tokens: token budget of a pack.
        anchors_per_pack: anchors granted to a pack, fewer only where its rows have fewer.
        shuffle_tokens: a window takes shards until it holds this many tokens.
        stream: which stream, from 0.
        num_streams: at most the number of shards.
    """
    shards = np.unique(table.shard)
    tokens = np.bincount(table.shard, weights=table.num_tokens)[shards]
    epoch = 0
    while True:
        random = np.random.default_rng([seed, epoch])
        order = random.permutation(len(shards))[stream::num_streams]
        window: list[int] = []
        held = 0
        for position, which in enumerate(order):
            window.append(int(shards[which]))
            held += int(tokens[which])
            if held >= shuffle_tokens or position == len(order) - 1:
                rows = np.flatnonzero(np.isin(table.shard, window))
                packs = _pack_window(table, random.permutation(rows), epoch, pack_tokens, anchors_per_pack)
                yield Window(shards=tuple(window), packs=tuple(packs))
                window, held = [], 0
        epoch += 1


def skip_packs(windows: Iterator[Window], count: int) -> Iterator[Window]:
    """Return the windows without their first `count` packs; nothing is read for what is skipped."""
    for window in windows:
        if count >= len(window.packs):
            count -= len(window.packs)
            continue
        rest = window.packs[count:]
        return itertools.chain([Window(shards=window.shards, packs=rest)], windows)
    raise AssertionError("the windows of a plan never end")


def grant_anchors(num_anchors: IntArray, total: int) -> IntArray:
    """Share `total` anchors among rows in proportion to what they have, by largest remainder, never more than that."""
    if num_anchors.sum() <= total:
        return num_anchors.copy()
    exact = num_anchors * (total / num_anchors.sum())
    quotas: IntArray = np.floor(exact).astype(np.int64)
    leftover = total - int(quotas.sum())
    quotas[np.argsort(-(exact - quotas), kind="stable")[:leftover]] += 1
    return quotas


def choose_anchors(eligible: IntArray, quota: int, *, seed: int, epoch: int, row: int) -> IntArray:
    """Return `quota` of a row's eligible positions, sorted: the head of a permutation fixed by (seed, epoch, row)."""
    random = np.random.default_rng([seed, epoch, row])
    chosen: IntArray = np.sort(random.permutation(eligible)[:quota])
    return chosen


def _pack_window(
    table: RowTable, rows: IntArray, epoch: int, pack_tokens: int, anchors_per_pack: int
) -> Iterator[PackSpec]:
    queue = [int(row) for row in rows]
    queue.reverse()
    waiting: list[int] = []
    while queue or waiting:
        while queue and len(waiting) < LOOKAHEAD_ROWS:
            waiting.append(queue.pop())
        pack = [waiting.pop(0)]
        room = pack_tokens - int(table.num_tokens[pack[0]])
        while waiting:
            lengths = table.num_tokens[waiting]
            fitting = np.where(lengths <= room, lengths, -1)
            best = int(np.argmax(fitting))
            if fitting[best] < 0:
                break
            room -= int(lengths[best])
            pack.append(waiting.pop(best))
        quotas = grant_anchors(table.num_anchors[pack], anchors_per_pack)
        yield PackSpec(
            epoch=epoch,
            rows=tuple(int(table.index[row]) for row in pack),
            quotas=tuple(int(quota) for quota in quotas),
        )
