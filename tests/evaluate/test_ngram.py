"""The n-gram baseline drafts what a plain dictionary of counts would."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_pipeline.errors import ConfigError
from dflash_pipeline.evaluate.ngram import NGram


def fit(rows: list[list[int]], vocab_size: int, max_order: int = 4) -> NGram:
    offsets = np.cumsum([0, *(len(row) for row in rows)])
    return NGram.fit(
        np.concatenate([np.array(row) for row in rows]), offsets, vocab_size=vocab_size, max_order=max_order
    )


def brute_force_draft(rows: list[list[int]], prefix: list[int], num_drafts: int, order: int) -> list[int]:
    counts: dict[tuple[int, ...], Counter[int]] = {}
    for row in rows:
        for place in range(len(row)):
            counts.setdefault((), Counter())[row[place]] += 1
            for length in range(1, order + 1):
                if place - length >= 0:
                    counts.setdefault(tuple(row[place - length : place]), Counter())[row[place]] += 1
    text, drafts = list(prefix), []
    for _ in range(num_drafts):
        length = max(n for n in range(min(order, len(text)) + 1) if tuple(text[len(text) - n :]) in counts)
        seen = counts[tuple(text[len(text) - length :])]
        drafts.append(min(seen, key=lambda token: (-seen[token], token)))
        text.append(drafts[-1])
    return drafts


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=6),
    query=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    order=st.integers(1, 4),
)
def test_drafts_equal_a_dictionary_of_counts(rows: list[list[int]], query: list[int], order: int) -> None:
    if all(len(row) < 2 for row in rows):
        rows.append([0, 0])
    anchors = np.arange(len(query))
    drafts = fit(rows, vocab_size=5).draft(np.array(query), anchors, 5, order=order)
    for anchor in anchors:
        assert drafts[anchor].tolist() == brute_force_draft(rows, query[: anchor + 1], 5, order)


def test_ties_go_to_the_lowest_id() -> None:
    assert fit([[7, 5], [7, 3], [7, 9]], vocab_size=10).draft(np.array([7]), np.array([0]), 1).tolist() == [[3]]


def test_a_context_never_reaches_into_the_row_before() -> None:
    model = fit([[1, 2], [3, 4], [5, 5, 5, 5]], vocab_size=8)
    assert model.draft(np.array([2]), np.array([0]), 1).tolist() == [[5]]  # 2 -> 3 only over the rows' border


def test_only_tokens_up_to_the_anchor_are_looked_at() -> None:
    model = fit([[1, 2, 3, 4, 1, 2, 4]], vocab_size=8)
    one, other = np.array([1, 2, 3, 4]), np.array([1, 2, 7, 7])
    anchors = np.array([0, 1])
    assert model.draft(one, anchors, 3).tolist() == model.draft(other, anchors, 3).tolist()


def test_rows_of_one_token_are_refused() -> None:
    with pytest.raises(ConfigError, match="no training row has two tokens"):
        fit([[1], [2]], vocab_size=4)


def test_half_a_million_tokens_take_seconds() -> None:
    source = np.random.default_rng(0)
    tokens = (source.zipf(1.3, size=500_000) - 1) % 150_000
    offsets = np.arange(0, 500_001, 500)
    started = time.perf_counter()
    model = NGram.fit(tokens, offsets, vocab_size=150_000)
    model.draft(tokens[:20_000], np.arange(20_000), 7)
    assert time.perf_counter() - started < 20
