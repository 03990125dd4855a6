from __future__ import annotations

import pytest
import torch

from dflash_pipeline.drafter.layout import PackLayout
from dflash_pipeline.errors import ConfigError


def test_positions_count_from_each_row() -> None:
    layout = PackLayout(torch.tensor([0, 3, 4, 8]), torch.tensor([1, 3, 4, 7]))
    assert layout.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert layout.rows.tolist() == [0, 1, 2, 2]
    assert layout.anchor_positions.tolist() == [1, 0, 0, 3]
    assert layout.slot_positions(2).tolist() == [1, 2, 0, 1, 0, 1, 3, 4]
    assert (layout.num_rows, layout.num_tokens, layout.num_anchors) == (3, 8, 4)


def test_an_anchor_may_stand_at_a_rows_end_where_its_row_is_named() -> None:
    offsets, anchors = torch.tensor([0, 3, 8]), torch.tensor([3, 8])
    assert PackLayout(offsets, anchors).anchor_positions.tolist() == [0, 5]
    assert PackLayout(offsets, anchors, torch.tensor([0, 1])).anchor_positions.tolist() == [3, 5]
    assert PackLayout.single_row(5, [5]).anchor_positions.tolist() == [5]


def test_empty_rows_and_no_anchors_are_allowed() -> None:
    layout = PackLayout(torch.tensor([0, 2, 2, 4]), torch.tensor([2]))
    assert layout.rows.tolist() == [2]
    assert PackLayout(torch.tensor([0, 4]), torch.tensor([], dtype=torch.int64)).num_anchors == 0
    assert PackLayout.single_row(0, [0]).anchor_positions.tolist() == [0]


@pytest.mark.parametrize(
    ("offsets", "anchors", "rows"),
    [
        ([1, 3], [1], None),
        ([0, 3, 2], [1], None),
        ([0, 3], [4], None),
        ([0, 3], [-1], None),
        ([0, 3], [2, 1], None),
        ([0, 3, 6], [4, 1], [1, 0]),
        ([0, 3, 6], [4], [0]),
        ([0, 3, 6], [2], [1]),
        ([0, 3], [2], [1]),
        ([0], [0], None),
    ],
)
def test_offsets_and_anchors_that_do_not_fit_are_refused(
    offsets: list[int], anchors: list[int], rows: list[int] | None
) -> None:
    with pytest.raises(ConfigError):
        PackLayout(torch.tensor(offsets), torch.tensor(anchors), None if rows is None else torch.tensor(rows))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match="int64"):
        PackLayout(torch.tensor([0, 3], dtype=torch.int32), torch.tensor([1]))


def test_what_is_cached_is_built_once() -> None:
    layout = PackLayout.single_row(3, [1])
    built: list[int] = []
    for _ in range(2):
        layout.cached("key", lambda: built.append(1))
    assert built == [1]
