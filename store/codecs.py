"""Which zarr codecs hold which array. Everything is in the zarr v3 specification: any zarr v3 library can read it.

Each array is one zarr shard file with inner chunks of `chunk_tokens` along its first axis; each inner chunk ends in
a crc32c, and so does the shard's index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

CODECS = ("lossless",)
STATE_CHUNK_TOKENS = 1024
SMALL_CHUNK_ITEMS = 16384


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How one kind of array is cut and coded: the arguments of zarr's create_array."""

    chunk_items: int
    filters: tuple[Any, ...]
    compressors: tuple[Any, ...]


def check_codec(codec: str) -> None:
    """Refuse a codec that does not exist.

    Raises:
        ConfigError: with the list of those that do.
    """
    if codec not in CODECS:
        raise ConfigError(f"codec {codec!r} is not one of: {', '.join(CODECS)}")


def pipeline_for(codec: str, kind: str) -> Pipeline:
    """Return the pipeline of one kind of array: `states` ([N, H]) or `small` (everything else)."""
    from zarr.codecs import Crc32cCodec, ZstdCodec

    check_codec(codec)
    if kind == "states":
        return Pipeline(chunk_items=STATE_CHUNK_TOKENS, filters=(), compressors=(ZstdCodec(level=3), Crc32cCodec()))
    return Pipeline(chunk_items=SMALL_CHUNK_ITEMS, filters=(), compressors=(ZstdCodec(level=3), Crc32cCodec()))
