"""Two caches of the same rows, compared layer by layer: does another kernel, dtype or batch shape change the states?

T tokens, H hidden.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from .progress import Bar, no_bar
from .reader import CacheReader, open_cache
from .rows import Row


def diff_caches(first: Path | str, second: Path | str, *, bar: Bar = no_bar) -> dict[str, Any]:
    """Compare the layers that two caches share, over the rows that they share.

    Rows are the same where id and tokens are. Memory: one shard of the first cache and its rows in the second.

    Returns:
        rows, tokens: compared. only_a, only_b: rows whose id the other lacks. other_tokens: rows of the same id and
        other tokens. top1_equal: share of positions with the same most likely next token. layers: layer id ->
        mean_cosine and min_cosine of the tokens' states (1 for two zero vectors); max_error, the largest absolute
        difference; relative_error, the RMS of the difference over the RMS of A's values; bit_equal, the share of equal
        values (a bfloat16 beside a float32 is widened first); nonfinite_tokens, which are in no other figure but
        bit_equal. only_layers: layers in just one.

    Raises:
        ConfigError: the caches share no row or no layer, or their states have other widths.
        CacheMissing, CacheIncomplete, CacheCorrupt: as `open_cache` and `read_shard`.
    """
    a, b = open_cache(first), open_cache(second)
    layers = [layer for layer in a.layer_ids if layer in b.layer_ids]
    if not layers:
        raise ConfigError(f"{b.place}: layers {list(b.layer_ids)}, {a.place} has {list(a.layer_ids)}: none is in both")
    if a.hidden_size != b.hidden_size:
        raise ConfigError(
            f"{b.place}: hidden size {b.hidden_size}, {a.place} has {a.hidden_size}: two different targets"
        )
    places = {name: row for row, name in enumerate(b.row_ids)}
    shared: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by A's shard
    for row, name in enumerate(a.row_ids):
        if name in places:
            shared[int(a.row_shard[row])].append((row, places[name]))
    num_shared = sum(map(len, shared.values()))
    sums = {layer: _Sums() for layer in layers}
    rows = tokens = other_tokens = top1_equal = 0
    with bar("compare", a.manifest.num_bytes) as advance:
        for shard in range(a.num_shards):
            for mine, theirs in _read_pairs(a, b, shard, shared[shard], layers):
                if not torch.equal(mine.tokens, theirs.tokens):
                    other_tokens += 1
                    continue
                rows, tokens = rows + 1, tokens + len(mine.tokens)
                top1_equal += int((mine.top_ids[:, 0] == theirs.top_ids[:, 0]).sum())
                for layer in layers:
                    sums[layer].add(mine.states[layer], theirs.states[layer])
            advance(a.manifest.shards[shard].num_bytes)
    if rows == 0:
        raise ConfigError(
            f"{a.place} and {b.place} have no row in common (same id and same tokens): nothing to compare"
        )
    return {
        "a": str(a.place),
        "b": str(b.place),
        "rows": rows,
        "tokens": tokens,
        "only_a": a.num_rows - num_shared,
        "only_b": b.num_rows - num_shared,
        "other_tokens": other_tokens,
        "top1_equal": top1_equal / tokens,
        "layers": {str(layer): sums[layer].result() for layer in layers},
        "only_layers": sorted(set(a.layer_ids) ^ set(b.layer_ids)),
    }


def _read_pairs(
    a: CacheReader, b: CacheReader, shard: int, pairs: list[tuple[int, int]], layers: Sequence[int]
) -> list[tuple[Row, Row]]:
    """Read one shard's rows of A and the same rows of B, shard by shard of B."""
    mine = a.read_shard(shard, layer_ids=layers, rows=[row for row, _ in pairs])
    wanted: dict[int, list[int]] = defaultdict(list)
    for _, row in pairs:
        wanted[int(b.row_shard[row])].append(row)
    theirs = {
        row: found
        for number, rows in wanted.items()
        for row, found in zip(rows, b.read_shard(number, layer_ids=layers, rows=rows), strict=True)
    }
    return [(row, theirs[place]) for row, (_, place) in zip(mine, pairs, strict=True)]


@dataclass
class _Sums:
    """What is known of one layer so far."""

    values: int = 0
    tokens: int = 0
    bit_equal: int = 0
    nonfinite: int = 0
    cosine: float = 0.0
    min_cosine: float = 1.0
    max_error: float = 0.0
    squares: float = 0.0
    error_squares: float = 0.0

    def add(self, mine_TH: Tensor, theirs_TH: Tensor) -> None:
        """Take one row's states in."""
        mine, theirs = mine_TH.float().numpy(), theirs_TH.float().numpy()
        self.values += mine.size
        self.bit_equal += int((mine.view(np.int32) == theirs.view(np.int32)).sum())
        finite = np.isfinite(mine).all(axis=1) & np.isfinite(theirs).all(axis=1)
        self.nonfinite += int((~finite).sum())
        left, right = mine[finite].astype(np.float64), theirs[finite].astype(np.float64)
        if not len(left):
            return
        norms = np.sqrt((left**2).sum(axis=1) * (right**2).sum(axis=1))
        same = np.abs(left - right).max(axis=1) == 0
        cosine = np.where(same, 1.0, (left * right).sum(axis=1) / np.where(norms > 0, norms, 1.0))
        self.tokens += len(left)
        self.cosine += float(cosine.sum())
        self.min_cosine = min(self.min_cosine, float(cosine.min()))
        self.max_error = max(self.max_error, float(np.abs(left - right).max()))
        self.squares += float((left**2).sum())
        self.error_squares += float(((left - right) ** 2).sum())

    def result(self) -> dict[str, float | int]:
        """Return the figures."""
        return {
            "mean_cosine": self.cosine / max(self.tokens, 1),
            "min_cosine": self.min_cosine,
            "max_error": self.max_error,
            "relative_error": float(np.sqrt(self.error_squares / self.squares)) if self.squares else 0.0,
            "bit_equal": self.bit_equal / self.values,
            "nonfinite_tokens": self.nonfinite,
        }
