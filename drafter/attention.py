"""Attention of block tokens to their context and their own block, three ways.

`plain`: one dense mask; the reference, quadratic in memory. `segment`: tiles of anchors that read only the context
before their last anchor; the CPU's way. `flex`: flex attention with a block mask; CUDA's way. All take the same
arguments and agree (tests).

Axes: T context tokens, N = A*B block tokens, Q query heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .layout import PackLayout, Value
from .masks import Tile, dense_mask, segment_tiles

KeyValue = tuple[Tensor, Tensor]
"""Keys (normed and rotated) and values of T tokens, each [T, K, D]."""


@dataclass(frozen=True)
class Scope:
    """What decides who sees whom in one layer: the pack, the block size, the window (None: a full layer)."""

    layout: PackLayout
    block_size: int
    window: int | None

    def cached(self, kind: str, like: Tensor, build: Callable[[], Value]) -> Value:
        """Return what `build` makes for tensors like `like`, once for all layers of this kind."""
        return self.layout.cached((kind, self.block_size, self.window, like.device, like.dtype), build)


Attend = Callable[[Tensor, KeyValue, KeyValue, Scope], Tensor]
"""(queries [N, Q, D], context's keys and values, the blocks' own keys and values, scope) -> [N, Q*D]"""


def plain_attention(queries: Tensor, context: KeyValue, own: KeyValue, scope: Scope) -> Tensor:
    """Softmax attention under the dense mask [N, T + N]."""
    mask = scope.cached(
        "dense", queries, lambda: dense_mask(scope.layout, scope.block_size, scope.window).to(queries.device)
    )
    groups = queries.shape[1] // own[0].shape[1]
    all_keys, all_values = (torch.cat(pair).repeat_interleave(groups, dim=1) for pair in zip(context, own, strict=True))
    scores = torch.einsum("nqd,mqd->qnm", queries, all_keys) * queries.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("qnm,mqd->nqd", weights, all_values).flatten(1)


def segment_attention(queries: Tensor, context: KeyValue, own: KeyValue, scope: Scope) -> Tensor:
    """Attention tile by tile: a tile's anchors read one slice of their row's context and their group's blocks.

    The query heads of one key head become rows of one product, so keys are never repeated for them. Against one slice
    of the whole pack per tile and repeated keys, this costs two thirds (1,024 tokens, 64 anchors of 16, 9 heads on 3,
    float32, one core: 48 against 71 ms forward and backward).
    """
    layout, block_size = scope.layout, scope.block_size
    num_queries, num_heads, head_dim = queries.shape
    num_kv_heads = own[0].shape[1]
    shared = num_heads // num_kv_heads
    tiles = scope.cached(
        "tiles",
        queries,
        lambda: segment_tiles(layout, block_size, scope.window, shared, queries.device, queries.dtype),
    )
    if not tiles:
        return queries.flatten(1)
    row_lengths = layout.row_offsets.diff().tolist()
    row_keys, row_values = (torch.split(part, row_lengths) for part in context)
    sizes = [(tile.last - tile.first) * block_size for tile in tiles]
    tile_queries = torch.split(queries.view(num_queries, num_kv_heads, shared, head_dim), sizes)
    tile_keys, tile_values = (torch.split(part, sizes) for part in own)
    out = []
    for index, tile in enumerate(tiles):
        keys = _tile_keys(row_keys[tile.row], tile_keys[index], tile)
        values = _tile_keys(row_values[tile.row], tile_values[index], tile)
        size = sizes[index] // tile.groups
        grouped = tile_queries[index].view(tile.groups, size, num_kv_heads, shared, head_dim).permute(0, 2, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(grouped.flatten(2, 3), keys, values, attn_mask=tile.mask)
        out.append(attended.view(grouped.shape).permute(0, 3, 1, 2, 4).reshape(sizes[index], -1))
    return torch.cat(out)


def _tile_keys(row: Tensor, own: Tensor, tile: Tile) -> Tensor:
    """Return [groups, K, keys, D]: what the tile's groups see of a row [n, K, D], then of their own blocks."""
    seen = row[tile.key_first : tile.key_last].expand(tile.groups, -1, -1, -1)
    return torch.cat([seen, own.view(tile.groups, -1, *own.shape[1:])], dim=1).transpose(1, 2)


@cache
def _compiled_flex() -> Callable[..., Any]:
    """Return flex attention compiled once; without compilation it holds the full scores."""
    from torch.nn.attention.flex_attention import flex_attention as flex  # noqa: PLC0415 (slow import, CUDA only)

    compiled: Callable[..., Any] = torch.compile(flex, dynamic=True)
    return compiled


def flex_attention(queries: Tensor, context: KeyValue, own: KeyValue, scope: Scope) -> Tensor:
    """Flex attention under the pack's block mask."""
    from .blocks import block_mask  # noqa: PLC0415 (slow import, CUDA only)

    if len(queries) == 0:
        return queries.flatten(1)
    keys, values = (torch.cat(pair).transpose(0, 1)[None] for pair in zip(context, own, strict=True))
    mask = scope.cached(
        "flex", queries, lambda: block_mask(scope.layout, scope.block_size, scope.window, queries.device)
    )
    attended: Tensor = _compiled_flex()(
        queries.transpose(0, 1)[None], keys, values, block_mask=mask, enable_gqa=queries.shape[1] != keys.shape[1]
    )
    return attended[0].transpose(0, 1).flatten(1)


ATTENTIONS: dict[str, Attend] = {"plain": plain_attention, "segment": segment_attention, "flex": flex_attention}


def choose_attention(name: str, device: torch.device) -> Attend:
    """Return the function of that name; `auto` is `flex` on CUDA and `segment` elsewhere. ConfigError if unknown."""
    if name == "auto":
        name = "flex" if device.type == "cuda" else "segment"
    if name not in ATTENTIONS:
        raise ConfigError(f"attention must be auto, {', '.join(ATTENTIONS)}, found {name!r}")
    return ATTENTIONS[name]
