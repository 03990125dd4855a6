"""Writing the arrays of one shard as a zarr v3 group.

zarr makes the metadata; the chunks are encoded here, because zarr copies each several times on its way
(benchmarks/codecs.py). Tests hold that zarr reads what is written here, and decode.py what zarr writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import zarr
from numcodecs import blosc
from zarr.storage import LocalStore

from .arrays import ArraySpec
from .codecs import Pipeline
from .decode import Array
from .layout import chunk_file

SHUFFLES = {"noshuffle": blosc.NOSHUFFLE, "shuffle": blosc.SHUFFLE}


def create_group(directory: Path) -> Any:
    """Make an empty zarr v3 group in a folder."""
    return zarr.create_group(store=LocalStore(directory), zarr_format=3)


def write_array(directory: Path, group: Any, spec: ArraySpec, codec: str, data: Array) -> None:
    """Write one array whole, as one zarr shard with every inner chunk stored, also one of zeros."""
    if data.shape != spec.shape or data.dtype != np.dtype(spec.dtype):
        raise ValueError(f"array {spec.name}: expected {spec.shape} {spec.dtype}, got {data.shape} {data.dtype}")
    pipeline = spec.pipeline(codec)
    chunk = (pipeline.chunk_items, *spec.shape[1:])
    whole = (-(-spec.shape[0] // chunk[0]) * chunk[0], *spec.shape[1:])
    group.create_array(
        spec.name,
        shape=spec.shape,
        dtype=spec.dtype,
        chunks=chunk,
        shards=whole,
        filters=(),
        compressors=pipeline.compressors,
        fill_value=0,
        attributes=spec.attributes,
    )
    write_data(directory / chunk_file(spec.name, len(spec.shape)), data, pipeline)


def write_data(path: Path, data: Array, pipeline: Pipeline) -> None:
    """Write an array's data file: its chunks, each with its checksum, and the index with its own.

    Args:
        path: the data file; its folder is made.
        data: any shape with a first axis of at least 1, C order, little-endian.
        pipeline: how to cut and code it.
    """
    settings = pipeline.compressors[0]["configuration"]
    coder = blosc.Blosc(settings["cname"], settings["clevel"], SHUFFLES[settings["shuffle"]], settings["blocksize"])
    items = pipeline.chunk_items
    entries = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for start in range(0, len(data), items):
            chunk = data[start : start + items]
            if len(chunk) < items:  # the last chunk is stored padded
                padding = np.zeros((items - len(chunk), *data.shape[1:]), dtype=data.dtype)
                chunk = np.concatenate([chunk, padding])
            payload = coder.encode(chunk)
            entries.append((file.tell(), len(payload) + 4))
            file.write(payload)
            file.write(_checksum(payload))
        index = np.asarray(entries, dtype="<u8").tobytes()
        file.write(index)
        file.write(_checksum(index))


def _checksum(data: bytes) -> bytes:
    return int(google_crc32c.value(data)).to_bytes(4, "little")
