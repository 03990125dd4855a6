"""Statistics of stored states, per layer and per channel.

Sums run over the token axis in float64, row after row, so they do not depend on threads or on the width of the
machine's vectors: equal states give equal bytes. Values that are not finite are counted and left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from torch import Tensor

from ..errors import CacheCorrupt, CacheMissing
from .decode import Array
from .durable import write_atomic
from .layout import STATS, file_size, plan_file, shard_dir, stats_file
from .plan import Plan
from .record import FileRecord, LayerStats, ShardRecord, digest_file

FloatArray = NDArray[np.float64]
BLOCK_TOKENS = 64  # a block of float64 stays in the processor's cache: 0.8 GB/s of bfloat16, 0.2 with 1,024


@dataclass(frozen=True, eq=False)
class ChannelSums:
    """[H] float64 sums and sums of squares of one layer's finite values."""

    total: FloatArray
    squares: FloatArray


def measure(states: Array) -> tuple[LayerStats, ChannelSums]:
    """Measure one layer's states.

    Args:
        states: [N, H] as stored: float32, or the uint16 bit patterns of bfloat16; any values.
    """
    hidden = states.shape[1]
    total, squares = np.zeros(hidden), np.zeros(hidden)
    zeros = nans = infs = 0
    for start in range(0, states.shape[0], BLOCK_TOKENS):
        block = as_float32(states[start : start + BLOCK_TOKENS])
        zeros += block.size - int(np.count_nonzero(block))
        finite = np.isfinite(block)
        if not finite.all():
            nans += int(np.count_nonzero(np.isnan(block)))
            infs += int(np.count_nonzero(np.isinf(block)))
            block = np.where(finite, block, np.float32(0))
        wide = block.astype(np.float64)
        total += wide.sum(axis=0)
        squares += np.multiply(wide, wide, out=wide).sum(axis=0)
    finite_count = states.size - nans - infs
    stats = LayerStats(
        values=states.size,
        zeros=zeros,
        nans=nans,
        infs=infs,
        mean=math.fsum(total) / finite_count if finite_count else 0.0,
        rms=math.sqrt(math.fsum(squares) / finite_count) if finite_count else 0.0,
    )
    return stats, ChannelSums(total, squares)


def as_float32(stored: Array) -> NDArray[np.float32]:
    """Return stored states as float32: bfloat16 is the upper half of one."""
    if stored.dtype == np.uint16:
        return np.left_shift(stored, 16, dtype=np.uint32).view(np.float32)
    return stored.astype(np.float32, copy=False)


def sums_bytes(sums: dict[int, ChannelSums]) -> bytes:
    """Return the bytes of stats.safetensors: `<layer>.sum` and `<layer>.sum_squares`, [H] float64."""
    tensors = {}
    for layer, part in sums.items():
        tensors[f"{layer}.sum"] = part.total
        tensors[f"{layer}.sum_squares"] = part.squares
    return bytes(save(tensors))


def read_sums(
    directory: Path, layer_ids: tuple[int, ...], hidden_size: int, name: str = STATS
) -> dict[int, ChannelSums]:
    """Read the statistics in a folder: a shard's, or a cache's under the name of its generation.

    Raises:
        CacheMissing: there is none.
        CacheCorrupt: it is damaged, or not of these layers and this width.
    """
    path = directory / name
    size, most = file_size(path), len(layer_ids) * (2 * 8 * hidden_size + 1024) + 1024
    if size is None:
        raise CacheMissing(f"{path}: missing; the cache is damaged, `dflash cache repair` makes it again")
    if size > most:
        raise CacheCorrupt(f"{path}: {size} bytes, statistics of {len(layer_ids)} layers have at most {most}")
    try:
        tensors = load_file(str(path))
        sums = {layer: ChannelSums(tensors[f"{layer}.sum"], tensors[f"{layer}.sum_squares"]) for layer in layer_ids}
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise CacheCorrupt(f"{path}: not the statistics of layers {list(layer_ids)} ({error})") from error
    for part in sums.values():
        for values in (part.total, part.squares):
            if values.shape != (hidden_size,) or values.dtype != np.float64:
                raise CacheCorrupt(f"{path}: expected [{hidden_size}] float64, found {values.shape} {values.dtype}")
            if not np.isfinite(values).all():
                raise CacheCorrupt(f"{path}: a sum that is not a finite number; the cache is damaged")
        if (part.squares < 0).any():
            raise CacheCorrupt(f"{path}: a sum of squares below zero; the cache is damaged")
    return sums


def add_sums(parts: list[dict[int, ChannelSums]]) -> dict[int, ChannelSums]:
    """Add the sums of shards, in their order."""
    return {
        layer: ChannelSums(
            np.sum([part[layer].total for part in parts], axis=0),
            np.sum([part[layer].squares for part in parts], axis=0),
        )
        for layer in parts[0]
    }


def write_totals(cache: Path, plan: Plan, records: Sequence[ShardRecord]) -> dict[str, FileRecord]:
    """Write the statistics of a whole cache, the sums of its shards'; return that file's record and the plan's."""
    generation, layer_ids = plan.identity.generation, plan.identity.layer_ids
    stored = [record.shard for record in records if record.num_rows]
    sums = add_sums([read_sums(shard_dir(cache, shard), layer_ids, plan.hidden_size) for shard in stored])
    write_atomic(cache / stats_file(generation), sums_bytes(sums))
    return {name: digest_file(cache / name) for name in (plan_file(generation), stats_file(generation))}


def channel_rms(sums: ChannelSums, num_tokens: int) -> Tensor:
    """Return the root mean square of each channel, [H] float32."""
    return torch.from_numpy(np.sqrt(sums.squares / max(num_tokens, 1)).astype(np.float32))
