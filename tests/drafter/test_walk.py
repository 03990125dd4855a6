from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_pipeline.drafter.walk import (
    DraftFn,
    RowWalk,
    WalkRow,
    acceptance_rates,
    count_accepted,
    eligible_anchors,
    macro_tau,
    micro_tau,
    supervised_runs,
    walk_rows,
)
from dflash_pipeline.errors import ConfigError

WRONG = 999


def scripted(rows: Sequence[WalkRow], runs: Sequence[Sequence[int]], num_drafts: int) -> DraftFn:
    """Drafts whose n-th block of a row is right for exactly runs[row][n] tokens (as far as the row goes)."""
    calls = [0] * len(rows)

    def draft(pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
        blocks = []
        for row, anchor in pairs:
            right = runs[row][calls[row]]
            calls[row] += 1
            following = list(rows[row].tokens[anchor + 1 : anchor + 1 + num_drafts])
            following += [WRONG] * (num_drafts - len(following))
            blocks.append(following[:right] + [WRONG] * (num_drafts - right))
        return blocks

    return draft


@pytest.mark.parametrize("copies", [1, 3])
def test_runs_of_3_2_1_0_are_tau_2_5_whatever_the_batch(copies: int) -> None:
    row = WalkRow.of(range(20), [0] * 5 + [1] * 11 + [0] * 4)
    rows = [row] * copies
    walks = walk_rows(scripted(rows, [[3, 2, 1, 0]] * copies, 7), rows)
    for walk in walks:
        assert walk == RowWalk(anchors=[5, 9, 12, 14], accepted=[3, 2, 1, 0], emitted=[4, 3, 2, 1])
    assert micro_tau(walks) == macro_tau(walks) == 2.5
    assert sum(sum(walk.accepted) for walk in walks) / sum(walk.verifications for walk in walks) == 1.5
    assert acceptance_rates(walks, 5) == [0.75, 0.5, 0.25, 0]


def test_rows_of_different_length_do_not_disturb_each_other() -> None:
    rows = [WalkRow.of(range(n), [1] * n) for n in (2, 30, 9)]
    runs = [[0], [7] * 5, [0] * 9]
    together = walk_rows(scripted(rows, runs, 7), rows)
    alone = [walk_rows(scripted([row], [run], 7), [row])[0] for row, run in zip(rows, runs, strict=True)]
    assert together == alone


def test_a_perfect_drafter_reaches_the_block_size() -> None:
    row = WalkRow.of(range(8 * 5 + 1), [1] * 41)
    walk = walk_rows(scripted([row], [[7] * 5], 7), [row])[0]
    assert walk.emitted == [8] * 5
    assert walk.tau == 8


def test_the_last_verification_is_cut_at_the_rows_end() -> None:
    row = WalkRow.of(range(7), [1] * 7)
    walk = walk_rows(scripted([row], [[3, 3]], 3), [row])[0]
    assert walk == RowWalk(anchors=[0, 4], accepted=[3, 2], emitted=[4, 2])
    row = WalkRow.of(range(6), [1] * 6)  # the fifth token comes from the verification itself: nothing is left to draft
    assert walk_rows(scripted([row], [[3, 0]], 3), [row])[0].emitted == [4, 1]
    row = WalkRow.of(range(5), [1] * 5)
    assert walk_rows(scripted([row], [[3]], 3), [row])[0].emitted == [4]


def test_the_walk_stops_at_a_hole_and_goes_on_at_the_next_turn() -> None:
    #                                0  1  2  3  4  5  6  7  8  9
    row = WalkRow.of(range(10), loss_mask=[0, 1, 1, 1, 0, 1, 0, 1, 1, 0])
    assert row.runs == ((1, 4), (7, 9))
    walk = walk_rows(scripted([row], [[7, 7]], 7), [row])[0]
    assert walk == RowWalk(anchors=[1, 7], accepted=[2, 1], emitted=[2, 1])


def test_rows_without_an_eligible_anchor_take_no_part() -> None:
    rows = [WalkRow.of([1, 2, 3], [0, 1, 0]), WalkRow.of([], [])]
    walks = walk_rows(lambda _: pytest.fail("nothing to draft"), rows)
    assert [walk.verifications for walk in walks] == [0, 0]
    assert math.isnan(walks[0].tau)
    assert math.isnan(micro_tau(walks))
    assert math.isnan(macro_tau(walks))
    assert all(math.isnan(rate) for rate in acceptance_rates(walks, 4))


def test_micro_weights_verifications_and_macro_rows() -> None:
    walks = [RowWalk([0], [3], [4]), RowWalk([0, 1, 2], [0, 0, 0], [1, 1, 1]), RowWalk([], [], [])]
    assert micro_tau(walks) == 7 / 4
    assert macro_tau(walks) == 2.5


def test_a_draft_of_minus_one_matches_nothing() -> None:
    assert count_accepted([1, -1, 3], [0, 1, 2, 3], 0, 4) == 1


def test_masks_and_drafts_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 tokens and 2"):
        WalkRow.of([1, 2, 3], [1, 1])
    with pytest.raises(ConfigError, match="1 blocks were asked for, 0"):
        walk_rows(lambda _: [], [WalkRow.of([1, 2], [1, 1])])


@given(mask=st.lists(st.booleans(), max_size=30))
def test_runs_hold_exactly_the_eligible_anchors(mask: list[bool]) -> None:
    expected = [a for a in range(len(mask) - 1) if mask[a] and mask[a + 1]]
    assert eligible_anchors(supervised_runs(mask)) == expected


@given(
    mask=st.lists(st.booleans(), min_size=1, max_size=40),
    runs=st.lists(st.integers(0, 4), min_size=40, max_size=40),
)
def test_every_supervised_token_after_a_runs_first_is_emitted_once(mask: list[bool], runs: list[int]) -> None:
    row = WalkRow.of(range(len(mask)), mask)
    walk = walk_rows(scripted([row], [runs], 4), [row])[0]
    emitted = [
        position
        for a, count in zip(walk.anchors, walk.emitted, strict=True)
        for position in range(a + 1, a + 1 + count)
    ]
    assert emitted == [anchor + 1 for anchor in eligible_anchors(row.runs)]
    assert all(1 <= count <= 5 for count in walk.emitted)
