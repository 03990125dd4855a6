"""What drafting without a drafter earns: prompt lookup and n-grams, by the same walk over the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..drafter.walk import RowWalk, WalkRow, eligible_anchors, micro_tau
from ..errors import ConfigError, counted
from ..store import CacheReader, Row
from .lookup import lookup_drafts
from .measure import walk_drafts
from .ngram import MAX_ORDER, NGram

NUM_PARTS = 5
MAX_FIT_TOKENS = 5_000_000


@dataclass(frozen=True, eq=False)
class TokenRow:
    """A row without states: tokens [T] int32, loss_mask [T] bool, and the hash of its prompt."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    prompt_hash: int

    @classmethod
    def of(cls, row: Row, prompt_hash: int) -> TokenRow:
        """Return copies: a row's own tensors are views that would keep its neighbours in memory."""
        return cls(row.tokens.numpy().copy(), row.loss_mask.numpy().copy(), prompt_hash)


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """Micro tau by name, empty where there was nothing to fit on; a line on where the n-gram comes from."""

    taus: dict[str, float]
    note: str


def read_token_rows(cache: CacheReader, rows: NDArray[np.int64], max_tokens: int = MAX_FIT_TOKENS) -> list[TokenRow]:
    """Read tokens and masks of rows, in cache order, up to `max_tokens` tokens: about 130 bytes each when fitted.

    Shards are fair samples of the corpus, so the first ones stand for all.
    """
    total = np.cumsum(cache.num_tokens[rows])
    rows = rows[: max(1, int(np.searchsorted(total, max_tokens, side="right")))]
    found = []
    for shard in np.unique(cache.row_shard[rows]).tolist():
        mine = rows[cache.row_shard[rows] == shard].tolist()
        for index, row in zip(mine, cache.read_shard(shard, layer_ids=[], rows=mine, top_k=False), strict=True):
            found.append(TokenRow.of(row, int(cache.prompt_hash[index])))
    return found


def lookup_tau(rows: Sequence[TokenRow], *, block_size: int) -> float:
    """Return micro tau of prompt lookup over `rows`, drafting block_size - 1 tokens."""
    walks = []
    for row in rows:
        walk_row = WalkRow.of(row.tokens.tolist(), row.loss_mask.tolist())
        anchors = eligible_anchors(walk_row.runs)
        walks.append(walk_drafts(walk_row, anchors, lookup_drafts(walk_row.tokens, anchors, block_size - 1)))
    return micro_tau(walks)


def ngram_baselines(
    fit_rows: Sequence[TokenRow], rows: Sequence[TokenRow], *, vocab_size: int, block_size: int
) -> Baselines:
    """Return micro tau of n-grams of order 1 to 4 over `rows`, drafting block_size - 1 tokens.

    No row is drafted by an n-gram that saw its prompt: where prompts of `rows` are among the `fit_rows`, all are cut
    into parts by prompt, and each part is drafted by an n-gram fitted on the others.
    """
    seen = {row.prompt_hash for row in fit_rows} & {row.prompt_hash for row in rows}
    prompts = sorted({row.prompt_hash for row in [*fit_rows, *rows]})
    parts = min(NUM_PARTS, len(prompts)) if seen else 1
    part_of = {prompt: index % parts for index, prompt in enumerate(prompts)}
    walks: dict[int, list[RowWalk]] = {order: [] for order in range(1, MAX_ORDER + 1)}
    try:
        for part in range(parts):
            mine = [row for row in rows if part_of[row.prompt_hash] == part]
            others = [row for row in fit_rows if not seen or part_of[row.prompt_hash] != part]
            if mine:
                _walk(_fit(others, vocab_size), mine, block_size, walks)
    except ConfigError as error:
        return Baselines(taus={}, note=f"none: {error}")
    note = f"fitted on {counted(len(fit_rows), 'row')}"
    if seen:
        note += f" in {parts} parts, each row drafted by an n-gram that did not see its prompt"
    return Baselines(taus={f"ngram_{order}": micro_tau(found) for order, found in walks.items()}, note=note)


def _fit(rows: Sequence[TokenRow], vocab_size: int) -> NGram:
    if not rows:
        raise ConfigError("there are no other rows to fit on")
    offsets = np.cumsum([0, *(len(row.tokens) for row in rows)])
    return NGram.fit(np.concatenate([row.tokens for row in rows]), offsets, vocab_size=vocab_size)


def _walk(ngram: NGram, rows: Sequence[TokenRow], block_size: int, walks: dict[int, list[RowWalk]]) -> None:
    """Add the walk of each row by each order."""
    for row in rows:
        walk_row = WalkRow.of(row.tokens.tolist(), row.loss_mask.tolist())
        anchors = eligible_anchors(walk_row.runs)
        for order, found in walks.items():
            drafts = ngram.draft(row.tokens, np.array(anchors), block_size - 1, order=order)
            found.append(walk_drafts(walk_row, anchors, drafts.tolist()))
