"""Packs and anchors are a pure function of seed, epoch and the row table."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_pipeline.train.sampling import RowTable, choose_anchors, grant_anchors, plan_windows, skip_packs


def table(num_rows: int = 300, num_shards: int = 7, seed: int = 0) -> RowTable:
    random = np.random.default_rng(seed)
    lengths = random.integers(8, 400, num_rows)
    return RowTable(
        index=np.arange(num_rows) * 2,
        num_tokens=lengths,
        num_anchors=np.maximum(1, lengths // 2),
        shard=np.sort(random.integers(0, num_shards, num_rows)),
    )


def epoch_of_packs(rows: RowTable, seed: int, epoch: int = 0, **changes: int) -> list:
    settings = {"pack_tokens": 1024, "anchors_per_pack": 64, "shuffle_tokens": 10_000, **changes}
    packs = (pack for window in plan_windows(rows, seed=seed, **settings) for pack in window.packs)
    return list(
        itertools.takewhile(
            lambda pack: pack.epoch <= epoch, itertools.dropwhile(lambda pack: pack.epoch < epoch, packs)
        )
    )


def test_every_row_is_used_once_an_epoch() -> None:
    rows = table()
    for epoch in (0, 1):
        used = [row for pack in epoch_of_packs(rows, 3, epoch) for row in pack.rows]
        assert sorted(used) == rows.index.tolist()


def test_epochs_and_seeds_differ_and_repeat_exactly() -> None:
    rows = table()
    assert epoch_of_packs(rows, 3) == epoch_of_packs(rows, 3)
    assert epoch_of_packs(rows, 3) != epoch_of_packs(rows, 4)
    assert [p.rows for p in epoch_of_packs(rows, 3)] != [p.rows for p in epoch_of_packs(rows, 3, 1)]


def test_packs_hold_the_budget_and_are_full() -> None:
    rows = table(2000, 3)
    length = dict(zip(rows.index.tolist(), rows.num_tokens.tolist(), strict=True))
    sizes = [sum(length[row] for row in pack.rows) for pack in epoch_of_packs(rows, 0, shuffle_tokens=10**9)]
    assert max(sizes) <= 1024
    assert np.mean(sizes) / 1024 > 0.95


def test_a_row_longer_than_the_budget_gets_a_pack_of_its_own() -> None:
    rows = RowTable(
        index=np.arange(3),
        num_tokens=np.array([50, 5000, 60]),
        num_anchors=np.array([9, 9, 9]),
        shard=np.zeros(3, dtype=np.int64),
    )
    packs = epoch_of_packs(rows, 0)
    assert sorted(pack.rows for pack in packs if 1 in pack.rows) == [(1,)]


def test_skipping_packs_gives_the_rest_of_the_same_stream() -> None:
    rows = table()
    settings = {"seed": 1, "pack_tokens": 1024, "anchors_per_pack": 64, "shuffle_tokens": 10_000}
    whole = [pack for window in itertools.islice(plan_windows(rows, **settings), 12) for pack in window.packs]
    for count in (0, 1, 30, len(whole) - 1):
        rest = skip_packs(plan_windows(rows, **settings), count)
        assert next(pack for window in rest for pack in window.packs) == whole[count]


@given(st.lists(st.integers(0, 500), min_size=1, max_size=20), st.integers(1, 300))
def test_quotas_add_up_and_never_exceed_what_a_row_has(available: list[int], total: int) -> None:
    quotas = grant_anchors(np.array(available), total)
    assert quotas.sum() == min(total, sum(available))
    assert (quotas <= np.array(available)).all()


def test_anchors_are_a_sorted_choice_fixed_by_seed_epoch_and_row() -> None:
    eligible = np.arange(100, 180)
    first = choose_anchors(eligible, 10, seed=1, epoch=2, row=3)
    assert (
        first.tolist() == sorted(set(first.tolist())) == choose_anchors(eligible, 10, seed=1, epoch=2, row=3).tolist()
    )
    for other in (
        {"seed": 2, "epoch": 2, "row": 3},
        {"seed": 1, "epoch": 3, "row": 3},
        {"seed": 1, "epoch": 2, "row": 4},
    ):
        assert first.tolist() != choose_anchors(eligible, 10, **other).tolist()


def test_a_larger_quota_keeps_the_anchors_of_a_smaller_one() -> None:
    eligible = np.arange(50)
    small, large = (choose_anchors(eligible, quota, seed=0, epoch=0, row=0) for quota in (5, 20))
    assert set(small.tolist()) < set(large.tolist())


@pytest.mark.parametrize("shuffle_tokens", [1, 10**9])
def test_a_window_holds_whole_shards(shuffle_tokens: int) -> None:
    rows = table()
    shard = dict(zip(rows.index.tolist(), rows.shard.tolist(), strict=True))
    window = next(plan_windows(rows, seed=0, pack_tokens=1024, anchors_per_pack=64, shuffle_tokens=shuffle_tokens))
    assert {shard[row] for pack in window.packs for row in pack.rows} == set(window.shards)
    assert len(window.shards) == (1 if shuffle_tokens == 1 else 7)
