"""How large a cache will be, from its tokens alone, before the first forward.

bytes = tokens * (L * H * item * ratio(dtype) + [H * item * ratio(dtype) with --keep-final] + 5 + 8 K * TOP_RATIO)
        + (1 or 2) * V * H * item

with L layers, H hidden, V head rows (once where head and embeddings are tied), K top choices; 5 bytes are a token's id
and mask, uncompressed. The ratios are those of the `lossless` codec, measured on SmolLM2-135M's five default layers.
They are the largest unknown: another model's states may compress a few percent better or worse.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ..errors import ConfigError
from ..target import TargetDescription

ITEM_BYTES = {"bfloat16": 2, "float32": 4}
STATE_RATIO = {"lossless": {"bfloat16": 0.70, "float32": 0.86}}
TOP_RATIO = 0.72
GIB = 2**30


def estimate_bytes(
    description: TargetDescription, num_tokens: int, *, num_layers: int, top_k: int, keep_final: bool, codec: str
) -> int:
    """Return the expected size of the cache on disk, in bytes; see the head of this module for the formula."""
    item = ITEM_BYTES[description.dtype]
    state = description.hidden_size * item * STATE_RATIO[codec][description.dtype]
    per_token = (num_layers + keep_final) * state + 5 + 8 * top_k * TOP_RATIO
    tied = bool(getattr(description.text_config, "tie_word_embeddings", False))
    head = description.vocab_size * description.hidden_size * item * (1 if tied else 2)
    return round(num_tokens * per_token) + head


def free_bytes(path: Path) -> int:
    """Return the free space of the file system on which `path` is or will be."""
    place = path.resolve()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def stored_bytes(path: Path) -> int:
    """Return the bytes of all files below `path`, written by an interrupted extraction; 0 where there is none."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else 0


def check_space(path: Path, estimated: int) -> None:
    """Refuse an extraction for which the disk is too small.

    Raises:
        ConfigError: the free space, plus what is already written at `path`, is smaller than the estimate.
    """
    needed, free = estimated - stored_bytes(path), free_bytes(path)
    if needed > free:
        raise ConfigError(
            f"{path}: the cache needs about {needed / GIB:,.2f} GiB more and the disk has {free / GIB:,.2f} GiB free: "
            "free some, choose another --out, or extract less (--limit, --limit-tokens, fewer --layers)"
        )
