"""Names, paths and limits of cache format 1. Only `file_size` and `safe_join` look at the disk.

    CACHE/plan.json  manifest.json  stats.safetensors  target/...  shards/NNNNN/...

Every path that comes out of a file of the cache goes through `safe_join`, so that a hostile manifest cannot name
anything outside its own folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import CacheCorrupt

IntArray = NDArray[np.int64]

FORMAT_VERSION = 1
PLAN = "plan.json"
MANIFEST = "manifest.json"
STATS = "stats.safetensors"
TARGET = "target"
HEAD = "head.safetensors"
SHARDS = "shards"
RECORD = "record.json"
LOCK = ".lock"
CLAIMS = ".claims"
TEMP_PREFIX = ".tmp-"

DTYPES = ("bfloat16", "float32")
ITEM_BYTES = {"bfloat16": 2, "float32": 4}

# Limits of the format: a file that declares more is refused before anything of that size is allocated.
MAX_HIDDEN = 2**18
MAX_VOCAB = 2**26
MAX_LAYERS = 2**12
MAX_ROW_TOKENS = 2**31 - 1
MAX_TOP_K = 2**10
MAX_JSON_BYTES = 2**31


def plan_file(generation: int) -> str:
    """Return the name of the plan of a cache that was extended so many times; the plans before it stay."""
    return PLAN if generation == 0 else f"plan-{generation}.json"


def stats_file(generation: int) -> str:
    """Return the name of the statistics of a cache that was extended so many times."""
    return STATS if generation == 0 else f"stats-{generation}.safetensors"


def shard_name(shard: int) -> str:
    """Return the folder name of a shard: five digits, more when they are needed."""
    return f"{shard:05d}"


def shard_dir(cache: Path, shard: int) -> Path:
    """Return the folder of a shard."""
    return cache / SHARDS / shard_name(shard)


def states_name(layer_id: int) -> str:
    """Return the array name of one layer's states inside a shard."""
    return f"states/{layer_id}"


def shard_file(shard: int, name: str) -> str:
    """Return the path of a shard's file inside the cache."""
    return f"{SHARDS}/{shard_name(shard)}/{name}"


def chunk_file(array: str, ndim: int) -> str:
    """Return the one data file of an array, relative to its shard: every array is a single zarr shard."""
    return f"{array}/c/" + "/".join("0" * ndim)


def is_plain(relative: str) -> bool:
    """Tell whether a path read from a file stays inside its root: relative, without `.`, `..` or odd characters."""
    return not any(part in ("", ".", "..") for part in relative.split("/")) and not any(
        character in relative for character in "\\\0:"
    )


def safe_join(root: Path, relative: str) -> Path:
    """Join a path read from a file to its root.

    Raises:
        CacheCorrupt: the path is absolute, empty, or could leave the root; or a symbolic link on the way does.
    """
    if not is_plain(relative):
        raise CacheCorrupt(f"{root}: the cache names the file {relative!r}, which is not a plain path inside it")
    path = root.joinpath(*relative.split("/"))
    try:
        inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))
    except OSError:
        inside = False
    if not inside:
        raise CacheCorrupt(f"{path}: a symbolic link leads out of the cache; put the file itself there")
    return path


def file_size(path: Path) -> int | None:
    """Return the size of a regular file in bytes, or None where there is none."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None
