"""A back-off n-gram drafter: what drafting costs nothing would earn on the same rows.

Order n looks at the last n tokens, drafts the most frequent next token of the longest suffix of them that was seen in
training, appends it and goes on. Everything is sorted integer arrays: no Python loop runs over tokens.

Axes: N training tokens, A anchors, B block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import ConfigError

IntArray = NDArray[np.int64]

MAX_ORDER = 4


@dataclass(frozen=True, kw_only=True)
class _Contexts:
    """The contexts of one length n: sorted keys `id of the first n-1 tokens * vocabulary + last token`, and for each
    the most frequent next token (ties: the lowest id). The place of a key is the id of its context."""

    keys: IntArray
    next_token: IntArray


class NGram:
    """Counts of all contexts of 1 to `max_order` tokens, reduced to their most frequent next token."""

    def __init__(self, tables: Sequence[_Contexts], most_frequent: int, vocab_size: int) -> None:
        self._tables = tuple(tables)
        self._most_frequent = most_frequent
        self._vocab_size = vocab_size

    @property
    def max_order(self) -> int:
        """The longest context this n-gram knows."""
        return len(self._tables)

    @classmethod
    def fit(cls, tokens: ArrayLike, row_offsets: ArrayLike, *, vocab_size: int, max_order: int = MAX_ORDER) -> NGram:
        """Count contexts in whole rows, prompts included; no context reaches over the start of its row.

        Measured: 0.26 s for 368,508 tokens of 1,226 rows on one core; peak memory about 130 bytes a token.

        Args:
            tokens: [N] ids, rows back to back, 0 <= id < vocab_size.
            row_offsets: [R+1] starts of the rows, and N.
            vocab_size: number of token ids.
            max_order: length of the longest context.

        Raises:
            ConfigError: no row has two tokens, or N * vocab_size does not fit 63 bits.
        """
        tokens = np.asarray(tokens, dtype=np.int64)
        if len(tokens) * vocab_size >= 2**63:
            raise ConfigError(f"n-gram over {len(tokens)} tokens of {vocab_size} ids: too many; give it fewer rows")
        position = np.arange(len(tokens), dtype=np.int64)
        offsets = np.asarray(row_offsets, dtype=np.int64)
        lengths = offsets[1:] - offsets[:-1]
        in_row = position - np.repeat(offsets[:-1], lengths)
        has_next = in_row < np.repeat(lengths, lengths) - 1
        if not has_next.any():
            raise ConfigError("n-gram: no training row has two tokens, so there is nothing to count")
        counts = np.bincount(tokens, minlength=1)
        tables: list[_Contexts] = []
        at = position[has_next]  # places of the contexts' last tokens
        context = np.zeros(len(tokens), dtype=np.int64)  # id of the context of length n-1 that ends at each place
        for order in range(1, max_order + 1):
            at = at[in_row[at] >= order - 1]
            if len(at) == 0:
                break
            previous = context[at - 1] if order > 1 else np.zeros(len(at), dtype=np.int64)
            keys, ids = np.unique(previous * vocab_size + tokens[at], return_inverse=True)
            tables.append(_Contexts(keys=keys, next_token=_most_frequent_next(ids, tokens[at + 1], vocab_size)))
            context = np.zeros(len(tokens), dtype=np.int64)
            context[at] = ids
        return cls(tables, int(counts.argmax()), vocab_size)

    def draft(self, tokens: ArrayLike, anchors: ArrayLike, num_drafts: int, *, order: int | None = None) -> IntArray:
        """Draft `num_drafts` tokens after each anchor of one row, greedily.

        Args:
            tokens: [T] ids of the row; only those up to an anchor are looked at for it.
            anchors: [A] positions in the row.
            num_drafts: B-1.
            order: longest context to use; all that were fitted, by default.

        Returns:
            [A, B-1] ids.
        """
        order = self.max_order if order is None else min(order, self.max_order)
        tokens, anchors = np.asarray(tokens, dtype=np.int64), np.asarray(anchors, dtype=np.int64)
        places = anchors[:, None] - np.arange(order - 1, -1, -1)
        window = np.where(places >= 0, tokens[np.maximum(places, 0)], -1)  # [A, order], -1 before the row
        drafts = np.empty((len(anchors), num_drafts), dtype=np.int64)
        for slot in range(num_drafts):
            drafts[:, slot] = self._next(window)
            window = np.concatenate([window[:, 1:], drafts[:, slot : slot + 1]], axis=1)
        return drafts

    def _next(self, window: IntArray) -> IntArray:
        """Return [A] next tokens for [A, order] last tokens, by the longest known suffix."""
        order = window.shape[1]
        best = np.full(len(window), self._most_frequent, dtype=np.int64)
        for length in range(1, order + 1):
            known = window[:, order - length] >= 0
            context = np.zeros(len(window), dtype=np.int64)
            for depth in range(length):
                table = self._tables[depth]
                key = context * self._vocab_size + np.maximum(window[:, order - length + depth], 0)
                place = np.minimum(np.searchsorted(table.keys, key), len(table.keys) - 1)
                known &= table.keys[place] == key
                context = place
            best[known] = self._tables[length - 1].next_token[context[known]]
        return best


def _most_frequent_next(contexts: IntArray, following: IntArray, vocab_size: int) -> IntArray:
    """Return for each context id its most frequent next token, ties to the lowest."""
    pairs, counts = np.unique(contexts * vocab_size + following, return_counts=True)
    owner, token = pairs // vocab_size, pairs % vocab_size
    ranking = np.lexsort((token, -counts, owner))
    first = np.concatenate([[True], owner[ranking][1:] != owner[ranking][:-1]])
    chosen: IntArray = token[ranking][first]
    return chosen
