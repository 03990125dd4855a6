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
from .masks import dense_mask, segment_tiles

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
    """Attention tile by tile: a tile's anchors read one slice of their row's context and each other's blocks.

    The query heads of one key head become rows of one product, so keys are never repeated. Against one slice of the
    whole pack per tile and repeated keys, this costs two thirds (1,024 tokens, 64 anchors of 16, 9 heads on 3, float32,
    one core: 48 against 71 ms forward and backward).
    """
    layout, block_size = scope.layout, scope.block_size
    num_queries, num_heads, head_dim = queries.shape
    num_kv_heads = own[0].shape[1]
    groups = num_heads // num_kv_heads
    tiles = scope.cached(
        "tiles",
        queries,
        lambda: segment_tiles(layout, block_size, scope.window, groups, queries.device, queries.dtype),
    )
    if not tiles:
        return queries.flatten(1)
    row_lengths = layout.row_offsets.diff().tolist()
    row_keys, row_values = (torch.split(part, row_lengths) for part in context)
    sizes = [(tile.last - tile.first) * block_size for tile in tiles]
    tile_queries = torch.split(queries.view(num_queries, num_kv_heads, groups, head_dim), sizes)
    tile_keys, tile_values = (torch.split(part, sizes) for part in own)
    out = []
    for index, tile in enumerate(tiles):
        seen = slice(tile.key_first, tile.key_last)
        keys = torch.cat([row_keys[tile.row][seen], tile_keys[index]]).transpose(0, 1)
        values = torch.cat([row_values[tile.row][seen], tile_values[index]]).transpose(0, 1)
        grouped = tile_queries[index].permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
        attended = nn.functional.scaled_dot_product_attention(
            grouped[None], keys[None], values[None], attn_mask=tile.mask
        )
        out.append(attended.view(num_kv_heads, groups, sizes[index], head_dim).permute(2, 0, 1, 3).flatten(1))
    return torch.cat(out)


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
