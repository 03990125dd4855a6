"""Which zarr codecs hold which array, as plain metadata: all are in the zarr v3 specification.

Each array is one zarr shard file with inner chunks along its first axis. Each inner chunk ends in a crc32c, and so
does the shard's index.

`lossless` splits a chunk into byte planes (blosc's shuffle) and codes them with zstd level 1. The planes of a
bfloat16 state are one of noise (mantissa), which zstd passes by, and one of exponents, which it codes by frequency;
higher levels find short matches among exponents, which cost more than they save. The whole chunk is one block of
blosc: with blosc's own block sizes a block of zstd holds both planes and codes neither well (benchmarks/codecs.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ConfigError

CODECS = ("lossless",)

CHUNK_BYTES = 2**22
MAX_CHUNK_ITEMS = 2**13
MIN_CHUNK_ITEMS = 2**4


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How one array is cut and coded: inner chunk along the first axis, and zarr codecs as metadata."""

    chunk_items: int
    compressors: tuple[dict[str, Any], ...]


def check_codec(codec: str) -> None:
    """Refuse a codec that does not exist.

    Raises:
        ConfigError: with the list of those that do.
    """
    if codec not in CODECS:
        raise ConfigError(f"codec {codec!r} is not one of: {', '.join(CODECS)}")


def chunk_items(item_bytes: int, num_items: int) -> int:
    """Return the length of an inner chunk: the largest power of two whose bytes fit CHUNK_BYTES, within its limits,
    and never more than there are items."""
    fitting = max(CHUNK_BYTES // item_bytes, 1)
    power = 1 << (fitting.bit_length() - 1)
    return min(max(power, MIN_CHUNK_ITEMS), MAX_CHUNK_ITEMS, num_items)


def pipeline_for(codec: str, shape: tuple[int, ...], dtype: str) -> Pipeline:
    """Return the pipeline of one array.

    Args:
        codec: one of CODECS.
        shape: of the array, first axis at least 1.
        dtype: the stored numpy dtype.
    """
    check_codec(codec)
    element_bytes = np.dtype(dtype).itemsize
    item_bytes = element_bytes * int(np.prod(shape[1:], dtype=np.int64))
    items = chunk_items(item_bytes, shape[0])
    blosc = {
        "typesize": element_bytes,
        "cname": "zstd",
        "clevel": 1,
        "shuffle": "shuffle" if element_bytes > 1 else "noshuffle",
        "blocksize": items * item_bytes,
    }
    return Pipeline(chunk_items=items, compressors=({"name": "blosc", "configuration": blosc}, {"name": "crc32c"}))
