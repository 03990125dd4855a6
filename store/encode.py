"""Encoding one zarr array into its data file: the inverse of decode.py, and byte for byte what zarr itself writes.

zarr makes the metadata. It does not encode here because it copies each chunk several times (benchmarks/codecs.py).
"""

from __future__ import annotations

from pathlib import Path

import google_crc32c
import numpy as np
from numcodecs import blosc

from .codecs import Pipeline
from .decode import Array

SHUFFLES = {"noshuffle": blosc.NOSHUFFLE, "shuffle": blosc.SHUFFLE}


def write_data(path: Path, data: Array, pipeline: Pipeline) -> None:
    """Write an array's chunks, their checksums, and the index.

    Args:
        path: the data file; its folder is made.
        data: any shape with a first axis of at least 1, C order, little-endian.
        pipeline: how to cut and code it.
    """
    settings = pipeline.compressors[0]["configuration"]
    items = pipeline.chunk_items
    entries = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for start in range(0, len(data), items):
            chunk = data[start : start + items]
            if len(chunk) < items:  # the last chunk is stored padded
                padding = np.zeros((items - len(chunk), *data.shape[1:]), dtype=data.dtype)
                chunk = np.concatenate([chunk, padding])
            payload = blosc.compress(
                chunk.reshape(-1),
                settings["cname"].encode(),
                settings["clevel"],
                SHUFFLES[settings["shuffle"]],
                settings["blocksize"],
                settings["typesize"],
            )
            entries.append((file.tell(), len(payload) + 4))
            file.write(payload)
            file.write(_checksum(payload))
        index = np.asarray(entries, dtype="<u8").tobytes()
        file.write(index)
        file.write(_checksum(index))


def _checksum(data: bytes) -> bytes:
    return int(google_crc32c.value(data)).to_bytes(4, "little")
