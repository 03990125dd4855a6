"""Which keys a query sees: one definition written twice, and the tiles of the CPU path.

Queries are the A*B block tokens; keys are the T context tokens of the pack, then the A*B block tokens.

- Context: positions strictly before the anchor, in the same row.
- Own block, full layer: all of it. Sliding layer: slots up to the query's own.
- Sliding layer: query position - key position < window, in the context and in the block.

`dense_mask` says so by rows and positions; `mask_mod` by indices, for flex attention. A test compares them position
by position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import PackLayout

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

TILE_QUERIES = 96
"""Block tokens of one group of the CPU path: enough for a fast matrix product, few enough that a group's masked part
stays small."""
TILE_GROUPS = 2
"""Groups of a tile, attended side by side: torch shares the key heads of one call among the cores, and three key heads
keep two cores busy for three quarters of the time. Two groups of 96 against one of 128, 9 heads on 3, block 16, best
of 21: 465 against 530 ms at 256 anchors over 2,048 tokens, 264 against 306 at 64 over 1,024 (two cores, float32).
Groups of 64 or 128, or four of them, are within the noise of that."""


def dense_mask(layout: PackLayout, block_size: int, window: int | None) -> Tensor:
    """Return [A*B, T + A*B] bool, true where the query sees the key. The reference: quadratic in memory."""
    num_rows = layout.num_rows
    token_rows = torch.repeat_interleave(torch.arange(num_rows), layout.row_offsets.diff())
    block = torch.repeat_interleave(torch.arange(layout.num_anchors), block_size)
    query_pos = layout.slot_positions(block_size)
    anchor_pos = layout.anchor_positions[block]
    context = (layout.rows[block][:, None] == token_rows) & (layout.positions < anchor_pos[:, None])
    own = block[:, None] == block
    mask = torch.cat([context, own], dim=1)
    if window is not None:
        key_pos = torch.cat([layout.positions, query_pos])
        distance = query_pos[:, None] - key_pos
        mask &= (distance >= 0) & (distance < window)
    return mask


def mask_mod(layout: PackLayout, block_size: int, window: int | None, device: torch.device) -> MaskMod:
    """Return the same predicate over (batch, head, query, key) indices, for flex attention."""
    anchors = layout.anchors.to(device)
    row_starts = layout.row_starts.to(device)
    num_tokens = layout.num_tokens

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // block_size
        anchor = anchors[block]
        slot = query - block * block_size
        context = (key >= row_starts[block]) & (key < anchor)
        key_slot = key - num_tokens - block * block_size
        own = (key >= num_tokens) & (key_slot >= 0) & (key_slot < block_size)
        if window is not None:
            context = context & (anchor + slot - key < window)
            own = own & (key_slot <= slot) & (slot - key_slot < window)
        return (key < num_tokens) & context | own

    return sees


@dataclass(frozen=True)
class Tile:
    """A run of anchors of one row, cut into `groups` groups of n anchors.

    Anchors first..last-1 see the positions key_first..key_last-1 of `row` and the blocks of their group, both under
    `mask` [groups, 1, heads*n*B, key_last-key_first + n*B]: 0 where seen, -inf elsewhere. None: all is seen.
    """

    row: int
    first: int
    last: int
    groups: int
    key_first: int
    key_last: int
    mask: Tensor | None


def segment_tiles(
    layout: PackLayout, block_size: int, window: int | None, heads: int, device: torch.device, dtype: torch.dtype
) -> list[Tile]:
    """Cut the anchors of each row into tiles of about TILE_GROUPS * TILE_QUERIES block tokens, in order.

    A tile's mask is repeated for the `heads` query heads that share a key head.
    """
    per_tile = TILE_GROUPS * max(1, TILE_QUERIES // block_size)
    rows, anchors = layout.rows.tolist(), layout.anchor_positions.tolist()
    tiles = []
    first = 0
    while first < len(anchors):
        last = first + 1
        while last < min(first + per_tile, len(anchors)) and rows[last] == rows[first]:
            last += 1
        groups = TILE_GROUPS if (last - first) % TILE_GROUPS == 0 else 1
        low, high = 0, anchors[last - 1]
        if window is not None:
            low = min(max(0, anchors[first] - window + 1), anchors[first])
        parts = layout.anchor_positions[first:last].view(groups, -1)
        mask = torch.stack([_group_mask(part, low, high, block_size, window) for part in parts])
        bias = None
        if not bool(mask.all()):
            bias = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, float("-inf"))
            bias = bias.repeat(1, heads, 1)[:, None].to(device)
        tiles.append(Tile(rows[first], first, last, groups, low, high, bias))
        first = last
    return tiles


def _group_mask(anchors: Tensor, low: int, high: int, block_size: int, window: int | None) -> Tensor:
    """Return the bool mask [n*B, high-low + n*B] of one group; anchors [n] and all else are positions in one row."""
    block = torch.repeat_interleave(torch.arange(len(anchors)), block_size)
    query = (anchors[:, None] + torch.arange(block_size)).flatten()
    key = torch.arange(low, high)
    mask = torch.cat([key < anchors[block][:, None], block[:, None] == block], dim=1)
    if window is not None:
        distance = query[:, None] - torch.cat([key, query])
        mask &= (distance >= 0) & (distance < window)
    return mask
