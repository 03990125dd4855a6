"""From cache to packs: shards are read ahead in the background, window by window, and cut into ready packs.

Axes: T tokens of the pack, K context layers, H hidden, A anchors, N supervised slots.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..drafter.layout import PackLayout
from ..errors import TrainingError
from ..store import CacheReader, Row
from .config import ResolvedConfig
from .labels import Supervision, eligible_positions, supervise
from .sampling import PackSpec, RowTable, Window, choose_anchors, plan_windows, skip_packs

QUEUED_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Pack:
    """What goes through the drafter at once, on the CPU; a step is one pack or several.

    `states_TC` [T, K*H] in the cache's dtype, columns in the order of the drafter's context layers; `tokens_T` [T]
    int64; `label_states_NH` [N, H] where the recipe takes labels from a state, at the positions that name the
    supervised slots' tokens; `stream` says which pack of its step it is.
    """

    spec: PackSpec
    stream: int
    row_ids: tuple[str, ...]
    layout: PackLayout
    tokens_T: Tensor
    states_TC: Tensor
    supervision: Supervision
    label_states_NH: Tensor | None


def build_pack(rows: list[Row], spec: PackSpec, config: ResolvedConfig, stream: int = 0) -> Pack:
    """Put rows back to back, choose their anchors and label their slots.

    Raises:
        TrainingError: a row's text uses the mask token.
    """
    mask_token, layers = config.drafter.mask_token_id, config.drafter.context_layer_ids
    for row in rows:
        if bool((row.tokens == mask_token).any()):
            raise TrainingError(
                f"row {row.id}: its text uses token {mask_token}, the mask token; "
                "pass one that no text uses with --set mask_token_id=ID"
            )
    lengths = torch.tensor([len(row.tokens) for row in rows])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    anchors, ends = [], []
    for row, number, quota, start, end in zip(
        rows, spec.rows, spec.quotas, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True
    ):
        eligible = eligible_positions(row.loss_mask).numpy().astype(np.int64)
        chosen = choose_anchors(eligible, quota, seed=config.recipe.seed, epoch=spec.epoch, row=number)
        anchors.append(torch.from_numpy(chosen) + start)
        ends.append(torch.full((len(chosen),), end))
    anchors_A, tokens_T = torch.cat(anchors), torch.cat([row.tokens for row in rows]).long()
    target_T = torch.cat([row.top_ids[:, 0] for row in rows]).long() if config.label_kind == "target" else None
    supervision = supervise(
        tokens_T=tokens_T,
        loss_mask_T=torch.cat([row.loss_mask for row in rows]),
        anchors_A=anchors_A,
        row_end_A=torch.cat(ends),
        target_T=target_T,
        block_size=config.drafter.block_size,
        gamma=config.recipe.gamma,
    )
    return Pack(
        spec=spec,
        stream=stream,
        row_ids=tuple(row.id for row in rows),
        layout=PackLayout(offsets, anchors_A),
        tokens_T=tokens_T,
        states_TC=torch.cat([torch.cat([row.states[layer] for layer in layers], 1) for row in rows]),
        supervision=supervision,
        label_states_NH=_label_states(rows, config, supervision.sources_N),
    )


def _label_states(rows: list[Row], config: ResolvedConfig, sources_N: Tensor) -> Tensor | None:
    if config.label_kind == "final":
        finals = [row.final for row in rows if row.final is not None]
        return torch.cat(finals)[sources_N]
    if config.label_layer is None:
        return None
    return torch.cat([row.states[config.label_layer] for row in rows])[sources_N]


@contextmanager
def open_steps(
    cache: CacheReader,
    table: RowTable,
    config: ResolvedConfig,
    *,
    first_step: int,
    num_workers: int,
    rank: int = 0,
    num_ranks: int = 1,
) -> Iterator[Iterator[list[Pack]]]:
    """Give an endless iterator over the packs of each step, from step `first_step` (0-based) on.

    Of the `packs_per_step` streams of packs, this process reads every `num_ranks`-th, so that ranks read different
    shards, and the packs of a step do not depend on the number of ranks.

    With workers, shards of the next window are decoded and packs are built in background threads (decoding leaves the
    interpreter lock), at most `QUEUED_STEPS` ahead; with none, all happens in the caller's thread. The packs are the
    same either way. Leaving the context stops the threads.
    """
    mine = range(rank, config.packs_per_step, num_ranks)

    def steps(pool: ThreadPoolExecutor | None) -> Iterator[list[Pack]]:
        streams = [_packs(cache, _windows(table, config, stream, first_step), config, pool, stream) for stream in mine]
        while True:
            yield [next(stream) for stream in streams]

    if num_workers == 0:
        yield steps(None)
        return
    with ThreadPoolExecutor(num_workers) as pool:
        ahead = _Ahead(steps(pool))
        try:
            yield iter(ahead)
        finally:
            ahead.stop()


def _windows(table: RowTable, config: ResolvedConfig, stream: int, first_step: int) -> Iterator[Window]:
    windows = plan_windows(
        table,
        seed=config.recipe.seed,
        pack_tokens=config.pack_tokens,
        anchors_per_pack=config.anchors_per_pack,
        shuffle_tokens=config.recipe.shuffle_tokens,
        stream=stream,
        num_streams=config.packs_per_step,
    )
    return skip_packs(windows, first_step)


def _packs(
    cache: CacheReader,
    windows: Iterator[Window],
    config: ResolvedConfig,
    pool: ThreadPoolExecutor | None,
    stream: int,
) -> Iterator[Pack]:
    layers = sorted(
        {*config.drafter.context_layer_ids, *([config.label_layer] if config.label_layer is not None else [])}
    )

    def read(shard: int) -> dict[int, Row]:
        numbers = np.flatnonzero(cache.row_shard == shard).tolist()
        rows = cache.read_shard(
            shard,
            layer_ids=layers,
            rows=numbers,
            top_k=config.label_kind == "target",
            final=config.label_kind == "final",
        )
        return dict(zip(numbers, rows, strict=True))

    def load(window: Window) -> list[Future[dict[int, Row]]] | list[dict[int, Row]]:
        if pool is None:
            return [read(shard) for shard in window.shards]
        return [pool.submit(read, shard) for shard in window.shards]

    upcoming = next(windows)
    loading = load(upcoming)
    while True:
        window, loaded = upcoming, loading
        rows: dict[int, Row] = {}
        for part in loaded:
            rows |= part.result() if isinstance(part, Future) else part
        upcoming = next(windows)
        if pool is not None:
            loading = load(upcoming)
        for spec in window.packs:
            yield build_pack([rows[number] for number in spec.rows], spec, config, stream)
        if pool is None:
            del rows, loaded
            loading = load(upcoming)


class _Ahead:
    """Runs an endless iterator in a thread, a few items ahead; its exception is raised in the consumer."""

    def __init__(self, source: Iterator[list[Pack]]) -> None:
        self._source = source
        self._items: queue.Queue[list[Pack] | BaseException] = queue.Queue(QUEUED_STEPS)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dflash-packs", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for item in self._source:
                if not self._put(item):
                    return
        except BaseException as error:
            self._put(error)

    def _put(self, item: list[Pack] | BaseException) -> bool:
        while not self._stopping.is_set():
            try:
                self._items.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[list[Pack]]:
        while True:
            item = self._items.get()
            if isinstance(item, BaseException):
                raise item
            yield item

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
