from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dflash_pipeline.drafter.blocks import block_mask
from dflash_pipeline.drafter.layout import PackLayout
from dflash_pipeline.drafter.masks import dense_mask, mask_mod, segment_tiles

LayoutOf = Callable[..., PackLayout]
CPU = torch.device("cpu")
CASES = [(seed, block, window) for seed, block in ((0, 2), (1, 3), (2, 8), (3, 4)) for window in (None, 1, 3, 9)]


def by_definition(layout: PackLayout, block_size: int, window: int | None) -> Tensor:
    """The definition in words, one pair at a time."""
    offsets = layout.row_offsets.tolist()
    token_row = [row for row in range(layout.num_rows) for _ in range(offsets[row], offsets[row + 1])]
    num_tokens, num_slots = len(token_row), layout.num_anchors * block_size
    mask = torch.zeros(num_slots, num_tokens + num_slots, dtype=torch.bool)
    anchors, rows = layout.anchors.tolist(), layout.rows.tolist()
    for block, (anchor, row) in enumerate(zip(anchors, rows, strict=True)):
        for slot in range(block_size):
            query = block * block_size + slot
            position = anchor + slot
            for key in range(num_tokens):
                near = window is None or position - key < window
                mask[query, key] = token_row[key] == row and key < anchor and near
            for other in range(block_size):
                seen = window is None or 0 <= slot - other < window
                mask[query, num_tokens + block * block_size + other] = seen
    return mask


@pytest.mark.parametrize(("seed", "block_size", "window"), CASES)
def test_dense_mask_is_the_definition(seed: int, block_size: int, window: int | None, layout_of: LayoutOf) -> None:
    layout = layout_of(seed, max_length=14)
    assert torch.equal(dense_mask(layout, block_size, window), by_definition(layout, block_size, window))


@pytest.mark.parametrize(("seed", "block_size", "window"), CASES)
def test_flex_mask_equals_the_dense_mask_position_by_position(
    seed: int, block_size: int, window: int | None, layout_of: LayoutOf
) -> None:
    layout = layout_of(seed)
    dense = dense_mask(layout, block_size, window)
    sees = mask_mod(layout, block_size, window, CPU)
    zero = torch.zeros((), dtype=torch.int64)
    query, key = torch.arange(dense.shape[0])[:, None], torch.arange(dense.shape[1])
    assert torch.equal(sees(zero, zero, query, key), dense)
    for index in torch.randint(dense.numel(), (50,), generator=torch.Generator().manual_seed(seed)):
        q, k = index // dense.shape[1], index % dense.shape[1]
        assert bool(sees(zero, zero, q, k)) == bool(dense[q, k])


@pytest.mark.parametrize("window", [None, 3, 200])
@pytest.mark.parametrize("block_size", [8, 16, 24])
@pytest.mark.parametrize("seed", [0, 1])
def test_flex_block_mask_covers_the_dense_mask_block_by_block(seed: int, block_size: int, window: int | None) -> None:
    """Built from intervals, it names every block in which something is seen, and calls full only what is."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([300, 1, 700, 129])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    anchors = torch.randperm(int(offsets[-1]), generator=generator)[:61].sort().values
    layout = PackLayout(offsets, anchors)
    dense = dense_mask(layout, block_size, window)
    made = block_mask(layout, block_size, window, CPU)
    assert made.seq_lengths == tuple(dense.shape)
    full = _block_grid(made.full_kv_num_blocks, made.full_kv_indices)
    partial = _block_grid(made.kv_num_blocks, made.kv_indices)
    assert not bool((full & partial).any())
    exact = 128 % block_size == 0
    for row in range(full.shape[0]):
        for column in range(full.shape[1]):
            part = dense[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128]
            named = bool(full[row, column]) or bool(partial[row, column])
            assert named == bool(part.any()) if exact else named >= bool(part.any())
            assert bool(full[row, column]) <= bool(part.all())
    assert window is not None or bool(full.any())


def _block_grid(counts: Tensor, indices: Tensor) -> Tensor:
    grid = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        grid[row, indices[0, 0, row, :count].long()] = True
    return grid


@pytest.mark.parametrize(("seed", "block_size", "window"), CASES)
def test_tiles_rebuild_the_dense_mask(seed: int, block_size: int, window: int | None, layout_of: LayoutOf) -> None:
    layout = layout_of(seed, max_length=40)
    dense = dense_mask(layout, block_size, window)
    rebuilt = torch.zeros_like(dense)
    next_anchor = 0
    for tile in segment_tiles(layout, block_size, window, 3, CPU, torch.float32):
        assert tile.first == next_anchor
        next_anchor = tile.last
        start = int(layout.row_offsets[tile.row])
        context = torch.arange(start + tile.key_first, start + tile.key_last)
        queries = torch.arange(tile.first * block_size, tile.last * block_size).view(tile.groups, -1)
        for group, part in enumerate(queries):
            keys = torch.cat([context, part + layout.num_tokens])
            bias = torch.zeros(3 * len(part), len(keys)) if tile.mask is None else tile.mask[group, 0]
            first, *others = bias.split(len(part))
            assert all(torch.equal(first, other) for other in others)
            rebuilt[part[:, None], keys] = first == 0
    assert next_anchor == layout.num_anchors
    assert torch.equal(rebuilt, dense)
