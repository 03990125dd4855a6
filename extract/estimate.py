"""How large a cache will be, from its tokens alone, before the first forward.

bytes = tokens * (L * H * item * ratio + [H * item * ratio with --keep-final] + 3 + 8 K * TOP_RATIO)
        + shards * (SHARD_BYTES + L * (LAYER_BYTES + 16 H)) + rows * ROW_BYTES
        + (1 or 2) * V * H * item + tokenizer

with L layers, H hidden, V head rows (once where head and embeddings are tied), K top choices. The ratio is that of the
`lossless` codec: base + slope * max(0, 7 - log10(bytes of an array)), since small arrays compress worse. Base and slope
lie in the middle of what was seen: in float32 0.71 (the embedded target, arrays of 15 MB), 0.82 (SmolLM2-135M, 43 and
70 MB; a random model, 4 MB), 0.90 and 1.00 (the same, 0.2 and 0.02 MB); in bfloat16 0.65 and 0.70 (SmolLM2-135M, 36
MB), 0.74 (1.5 MB) and 0.72 (a random model, 0.2 MB). They are the largest unknown: another model's states may compress
a few percent better or worse.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError
from ..store.manifest import read_manifest
from ..store.plan import assign_rows
from ..store.render import size
from ..target import TargetDescription
from .config import ExtractConfig

ITEM_BYTES = {"bfloat16": 2, "float32": 4}
STATE_RATIO = {"lossless": {"bfloat16": (0.67, 0.03), "float32": (0.77, 0.07)}}
TOP_RATIO = 0.6
TOKEN_BYTES = 3
ROW_BYTES = 100  # a row's entries in plan.json and in its shard
SHARD_BYTES = 12_000  # zarr's metadata and a shard's record
LAYER_BYTES = 1_400


def estimate_bytes(
    config: ExtractConfig, description: TargetDescription, num_layers: int, num_tokens: Sequence[int]
) -> int:
    """Return the expected size of the cache on disk, in bytes; see the head of this module for the formula.

    `num_tokens` are those of each row. A cache that is extended keeps what it has, the target's head with it; the rows
    are the new ones.
    """
    item, hidden_size = ITEM_BYTES[description.dtype], description.hidden_size
    total = sum(num_tokens)
    num_shards = len(assign_rows(num_tokens, config.shard_tokens)[1])
    base, slope = STATE_RATIO[config.codec][description.dtype]
    ratio = base + slope * max(0.0, 7 - math.log10(total / num_shards * hidden_size * item))
    state = hidden_size * item * ratio
    per_token = (num_layers + config.keep_final) * state + TOKEN_BYTES + 8 * config.top_k * TOP_RATIO
    per_shard = SHARD_BYTES + num_layers * (LAYER_BYTES + 16 * hidden_size)
    tied = bool(getattr(description.text_config, "tie_word_embeddings", False))
    head = description.vocab_size * hidden_size * item * (1 if tied else 2)
    there = read_manifest(config.folder).num_bytes if config.append else head + _tokenizer_bytes(description)
    rest = len(num_tokens) * ROW_BYTES + there
    return round(total * per_token + num_shards * per_shard) + rest


def _tokenizer_bytes(description: TargetDescription) -> int:
    backend = getattr(description.tokenizer, "backend_tokenizer", None)
    return 0 if backend is None else len(backend.to_str(pretty=True).encode("utf-8", "surrogatepass"))


def free_bytes(path: Path) -> int:
    """Return the free space of the file system on which `path` is or will be."""
    place = path.resolve()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def stored_bytes(path: Path) -> int:
    """Return the bytes of all files below `path`, written by an interrupted extraction; 0 where there is none."""
    total = 0
    for folder, _, names in os.walk(path):  # passes over folders that another worker renames meanwhile
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += Path(folder, name).stat().st_size
    return total


def check_work_space(work: Path, needed: int) -> None:
    """Refuse an extraction into a bucket for which the local disk is too small.

    Raises:
        ConfigError: the free space is smaller than what is needed.
    """
    free = free_bytes(work)
    if needed > free:
        raise ConfigError(
            f"{work}: a shard of each worker, on its way into the bucket, needs about {size(needed)} and the "
            f"disk has {size(free)} free: free some, choose another --work, or smaller shards (--shard-tokens)"
        )


def check_space(path: Path, estimated: int) -> None:
    """Refuse an extraction for which the disk is too small.

    Raises:
        ConfigError: the free space, plus what is already written at `path`, is smaller than the estimate.
    """
    needed, free = estimated - stored_bytes(path), free_bytes(path)
    if needed > free:
        raise ConfigError(
            f"{path}: the cache needs about {size(needed)} more and the disk has {size(free)} free: "
            "free some, choose another --out, or extract less (--limit, --limit-tokens, fewer --layers)"
        )
