"""How large a cache will be, from its tokens alone, before the first forward.

bytes = tokens * (L * H * item * ratio(dtype) + [H * item * ratio(dtype) with --keep-final] + 3 + 8 K * TOP_RATIO)
        + shards * (SHARD_BYTES + L * (LAYER_BYTES + 16 H)) + rows * ROW_BYTES
        + (1 or 2) * V * H * item + tokenizer

with L layers, H hidden, V head rows (once where head and embeddings are tied), K top choices. The ratios are those of
the `lossless` codec: SmolLM2-135M's five default layers give 0.70 (62,000 tokens) to 0.74 (1,300) in bfloat16 and
0.89 (2,600) in float32, a random model 0.69 and 0.84, and a few percent more in tiny shards. They are the largest
unknown: another model's states may compress a few percent better or worse.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ..errors import ConfigError
from ..target import TargetDescription
from .config import ExtractConfig

ITEM_BYTES = {"bfloat16": 2, "float32": 4}
STATE_RATIO = {"lossless": {"bfloat16": 0.71, "float32": 0.87}}
TOP_RATIO = 0.6
TOKEN_BYTES = 3
ROW_BYTES = 100  # a row's entries in plan.json and in its shard
SHARD_BYTES = 12_000  # zarr's metadata and a shard's record
LAYER_BYTES = 1_400
GIB = 2**30


def estimate_bytes(
    config: ExtractConfig, description: TargetDescription, num_layers: int, num_tokens: int, num_rows: int
) -> int:
    """Return the expected size of the cache on disk, in bytes; see the head of this module for the formula."""
    item, hidden_size = ITEM_BYTES[description.dtype], description.hidden_size
    state = hidden_size * item * STATE_RATIO[config.codec][description.dtype]
    per_token = (num_layers + config.keep_final) * state + TOKEN_BYTES + 8 * config.top_k * TOP_RATIO
    per_shard = SHARD_BYTES + num_layers * (LAYER_BYTES + 16 * hidden_size)
    num_shards = -(-num_tokens // config.shard_tokens)
    tied = bool(getattr(description.text_config, "tie_word_embeddings", False))
    head = description.vocab_size * hidden_size * item * (1 if tied else 2)
    rest = num_rows * ROW_BYTES + head + _tokenizer_bytes(description)
    return round(num_tokens * per_token + num_shards * per_shard) + rest


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
