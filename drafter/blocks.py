"""The block mask of flex attention, from intervals alone: the grid of queries and keys is never materialised.

Axes: A anchors, B block, Q blocks of 128 queries, K blocks of 128 keys (T context tokens, then A*B block tokens).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .layout import PackLayout
from .masks import mask_mod

TILE = 128
"""Queries and keys of one block, flex attention's own default."""


def block_mask(layout: PackLayout, block_size: int, window: int | None, device: torch.device) -> BlockMask:
    """Return the block mask of a pack's attention, [1, 1, A*B, T + A*B].

    Costs O(Q*A/Q*K + Q*K): what a query block sees is the union of one interval of context and one of block tokens for
    each of its anchors.
    """
    num_queries = layout.num_anchors * block_size
    seen_QK, whole_QK = block_coverage(layout, block_size, window)
    partial_QK = seen_QK & ~whole_QK
    counts, indices = _ordered(partial_QK)
    full_counts, full_indices = _ordered(whole_QK)
    return BlockMask.from_kv_blocks(
        counts.to(device),
        indices.to(device),
        full_counts.to(device),
        full_indices.to(device),
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod(layout, block_size, window, device),
        seq_lengths=(num_queries, layout.num_tokens + num_queries),
    )


def block_coverage(layout: PackLayout, block_size: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Return two [Q, K] bool on the CPU: blocks of which something may be seen, and blocks of which all is seen.

    The first may hold a block too many (only in sliding layers, where slots of one anchor see different windows), never
    one too few; the second may hold one too few.
    """
    num_tokens, num_queries = layout.num_tokens, layout.num_anchors * block_size
    key_low = torch.arange(-(-(num_tokens + num_queries) // TILE)) * TILE
    key_high = key_low + TILE
    anchors, starts = layout.anchors[:, None], layout.row_starts[:, None]
    first, last = starts, starts  # the start of what slot 0 and slot B-1 see
    if window is not None:
        first = torch.maximum(starts, anchors - window + 1)
        last = torch.maximum(starts, anchors + block_size - window)
    own_low = num_tokens + torch.arange(layout.num_anchors)[:, None] * block_size
    context_AK = (first < key_high) & (anchors > key_low) & (first < anchors)
    own_AK = (own_low < key_high) & (own_low + block_size > key_low)
    whole_AK = (last <= key_low) & (anchors >= key_high)
    first_anchor = torch.arange(-(-num_queries // TILE)) * TILE // block_size
    last_anchor = ((torch.arange(len(first_anchor)) + 1) * TILE - 1).clamp(max=num_queries - 1) // block_size
    seen_QK = _counts(context_AK | own_AK, first_anchor, last_anchor) > 0
    whole_QK = _counts(whole_AK, first_anchor, last_anchor) == (last_anchor - first_anchor + 1)[:, None]
    return seen_QK, whole_QK


def _counts(flags_AK: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Return how many of the anchors first..last of each query block have the flag, [Q, K]."""
    sums = torch.cat([torch.zeros(1, flags_AK.shape[1], dtype=torch.int64), flags_AK.long().cumsum(0)])
    return sums[last + 1] - sums[first]


def _ordered(flags_QK: Tensor) -> tuple[Tensor, Tensor]:
    """Return counts [1, 1, Q] and, set ones first, key blocks [1, 1, Q, K], as int32."""
    counts = flags_QK.sum(1).to(torch.int32)
    indices = torch.argsort(flags_QK.to(torch.int8), dim=1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], indices[None, None]
