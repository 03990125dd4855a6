"""The free n-gram walks the same rows by the same rule, and never sees the prompt that it drafts for."""

from __future__ import annotations

import numpy as np

from dflash_pipeline.evaluate.baselines import TokenRow, ngram_baselines
from dflash_pipeline.evaluate.ngram import NGram


def token_row(tokens: list[int], prompt: int, prompt_hash: int) -> TokenRow:
    mask = np.arange(len(tokens)) >= prompt
    return TokenRow(np.array(tokens, dtype=np.int32), mask, prompt_hash)


def random_rows(count: int, seed: int, first_hash: int) -> list[TokenRow]:
    """Rows of a first-order chain that mostly goes round in a circle."""
    source = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        tokens = [int(source.integers(20))]
        for _ in range(int(source.integers(8, 40))):
            tokens.append((tokens[-1] + 1) % 20 if source.random() < 0.8 else int(source.integers(20)))
        rows.append(token_row(tokens, 3, first_hash + index))
    return rows


def slow_tau(fit: list[TokenRow], rows: list[TokenRow], order: int, block_size: int) -> float:
    """One n-gram, one anchor at a time."""
    offsets = np.cumsum([0, *(len(row.tokens) for row in fit)])
    ngram = NGram.fit(np.concatenate([row.tokens for row in fit]), offsets, vocab_size=20)
    tokens = verifications = 0
    for row in rows:
        ids, anchor = row.tokens.tolist(), 3
        while anchor + 1 < len(ids):
            drafts = ngram.draft(row.tokens[: anchor + 1], np.array([anchor]), block_size - 1, order=order)[0]
            rest = ids[anchor + 1 : anchor + block_size]
            accepted = next((k for k, token in enumerate(rest) if drafts[k] != token), len(rest))
            tokens += min(accepted + 1, len(ids) - 1 - anchor)
            verifications += 1
            anchor += accepted + 1
    return tokens / verifications


def test_taus_equal_a_slow_walk() -> None:
    fit, rows = random_rows(30, 0, first_hash=0), random_rows(12, 1, first_hash=1000)
    found = ngram_baselines(fit, rows, vocab_size=20, block_size=6)
    assert found.taus == {f"ngram_{order}": slow_tau(fit, rows, order, 6) for order in (1, 2, 3, 4)}
    assert found.taus["ngram_1"] > 2
    assert found.note == "fitted on 30 rows"


def test_a_row_is_never_drafted_by_an_n_gram_that_saw_its_prompt() -> None:
    source = np.random.default_rng(2)
    random = [token_row(source.integers(0, 500, 40).tolist(), 3, index) for index in range(20)]
    found = ngram_baselines(random, random, vocab_size=500, block_size=8)
    assert found.taus["ngram_4"] < 1.05  # memorised, it would be near 8
    assert "did not see its prompt" in found.note


def test_the_parts_keep_duplicates_of_a_prompt_together() -> None:
    source = np.random.default_rng(3)
    random = [token_row(source.integers(0, 500, 40).tolist(), 3, index) for index in range(10)]
    found = ngram_baselines([*random, *random], [*random, *random], vocab_size=500, block_size=8)
    assert found.taus["ngram_4"] < 1.05


def test_a_single_row_has_no_baseline_and_says_why() -> None:
    row = random_rows(1, 4, first_hash=7)
    found = ngram_baselines(row, row, vocab_size=20, block_size=8)
    assert found.taus == {}
    assert found.note == "none: there are no other rows to fit on"
