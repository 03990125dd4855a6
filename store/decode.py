"""Decoding ranges of one zarr array straight into the result: our fast path, held equal to zarr's reader by a test.

Why not zarr's own reader: it takes a chunk that is missing from an index, or a file that is gone, for zeros; it
runs an event loop in a thread, which a forked worker does not have; and it copies each chunk several times
(benchmarks/codecs.py has the numbers). The format stays zarr's: any zarr v3 library reads the same arrays.

A data file is one zarr shard: the encoded inner chunks, then an index of (offset, length) pairs of little-endian
uint64 in the order of the chunks, then the index' crc32c. Each encoded chunk is a blosc buffer and its crc32c.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
from numcodecs import blosc
from numpy.typing import NDArray

from ..errors import CacheCorrupt, CacheMissing
from .codecs import Pipeline

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Run = tuple[int, int]
INDEX_ENTRY_BYTES = 16
CHECKSUM_BYTES = 4
BLOSC_HEADER_BYTES = 16
MAX_RATIO = 2**15  # zstd spends at least 4 bytes on each 128 KiB: a file that promises more is refused unallocated


def read_runs(
    path: Path, num_bytes: int, shape: tuple[int, ...], dtype: str, pipeline: Pipeline, runs: Sequence[Run]
) -> list[Array]:
    """Read ranges of the first axis of an array, each chunk checked by its crc32c before it is decoded.

    Args:
        path: the array's data file. num_bytes: its recorded size.
        shape, dtype: of the whole array.
        pipeline: how it is cut and coded.
        runs: (start, stop) in items of the first axis, each starting at a chunk's start.

    Raises:
        CacheMissing: there is no such file, or it may not be read.
        CacheCorrupt: it has another size, or a checksum does not fit.
    """
    try:
        if not path.is_file():
            raise FileNotFoundError
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != num_bytes:
                raise _corrupt(path, f"expected {num_bytes} bytes, found {size}")
            index = _read_index(file, path, size, -(-shape[0] // pipeline.chunk_items))
            if math.prod(shape) * np.dtype(dtype).itemsize > size * MAX_RATIO:
                raise _corrupt(path, f"{size} bytes cannot hold an array of shape {shape} and type {dtype}")
            scratch = np.empty(int(index[:, 1].max()), dtype=np.uint8)
            return [_read_run(file, path, shape, dtype, pipeline, index, scratch, run) for run in runs]
    except FileNotFoundError as error:
        raise CacheMissing(f"{path}: missing; the cache is damaged, `dflash cache repair` makes it again") from error
    except OSError as error:
        raise CacheMissing(f"{path}: cannot be read ({error.strerror or error})") from error
    except MemoryError as error:
        raise CacheCorrupt(f"{path}: an array of shape {shape} and type {dtype} does not fit into memory") from error


def _read_index(file: BinaryIO, path: Path, size: int, num_chunks: int) -> NDArray[np.int64]:
    """Return [chunks, 2] offsets and lengths; all chunks are there and inside the file."""
    index_bytes = num_chunks * INDEX_ENTRY_BYTES
    data_bytes = size - index_bytes - CHECKSUM_BYTES
    if data_bytes < num_chunks * (BLOSC_HEADER_BYTES + CHECKSUM_BYTES):
        raise _corrupt(path, f"{size} bytes are too few for {num_chunks} chunks")
    file.seek(data_bytes)
    tail = np.frombuffer(file.read(index_bytes + CHECKSUM_BYTES), dtype=np.uint8)
    if len(tail) != index_bytes + CHECKSUM_BYTES or not _checksum_fits(tail):
        raise _corrupt(path, "the checksum of its index does not fit")
    index = tail[:index_bytes].view("<u8").reshape(num_chunks, 2)
    least = BLOSC_HEADER_BYTES + CHECKSUM_BYTES
    if (index > data_bytes).any() or (index.sum(axis=1) > data_bytes).any() or (index[:, 1] < least).any():
        raise _corrupt(path, "its index lacks chunks or names bytes outside the file")
    if int(index[:, 1].sum()) > data_bytes:
        raise _corrupt(path, "its chunks take more bytes than it has: one stands for several")
    return index.astype(np.int64)


def _read_run(
    file: BinaryIO,
    path: Path,
    shape: tuple[int, ...],
    dtype: str,
    pipeline: Pipeline,
    index: NDArray[np.int64],
    scratch: Bytes,
    run: Run,
) -> Array:
    start, stop = run
    items = pipeline.chunk_items
    out: Array = np.empty((stop - start, *shape[1:]), dtype=dtype)
    for chunk in range(start // items, -(-stop // items)):
        offset, length = index[chunk].tolist()
        file.seek(offset)
        payload = scratch[:length]
        if file.readinto(payload.data) != length or not _checksum_fits(payload):  # type: ignore[attr-defined]
            raise _corrupt(path, f"the checksum of chunk {chunk} does not fit")
        first = chunk * items - start
        place = out[first : first + items]
        if len(place) == items:
            _decode_into(path, chunk, payload[:-CHECKSUM_BYTES], place)
        else:  # the last chunk is stored padded
            whole = np.empty((items, *shape[1:]), dtype=dtype)
            _decode_into(path, chunk, payload[:-CHECKSUM_BYTES], whole)
            place[...] = whole[: len(place)]
    return out


def _decode_into(path: Path, chunk: int, payload: Bytes, place: Array) -> None:
    """Decode one blosc buffer into its place; its header must name exactly the bytes of the place."""
    decoded, encoded = (int.from_bytes(payload[start : start + 4].tobytes(), "little") for start in (4, 12))
    if decoded != place.nbytes or encoded != len(payload):
        raise _corrupt(path, f"chunk {chunk} holds {decoded} bytes, expected {place.nbytes}")
    try:
        blosc.decompress(payload, place)
    except (RuntimeError, ValueError) as error:
        raise _corrupt(path, f"chunk {chunk} cannot be decoded ({error})") from error


def _checksum_fits(data: Bytes) -> bool:
    stored = int.from_bytes(data[-CHECKSUM_BYTES:].tobytes(), "little")
    return bool(google_crc32c.value(data[:-CHECKSUM_BYTES]) == stored)


def check_metadata(path: Path, shape: tuple[int, ...], dtype: str, pipeline: Pipeline) -> None:
    """Check that an array's zarr.json says what this reader decodes. Fields that zarr may add are not looked at.

    Raises:
        CacheCorrupt: it does not.
    """
    try:
        metadata = json.loads(path.read_bytes())
        (codec,) = metadata["codecs"]
        sharding = codec["configuration"]
        found = [
            metadata["zarr_format"],
            metadata["node_type"],
            metadata["shape"],
            metadata["data_type"],
            codec["name"],
            sharding["chunk_shape"],
            sharding["index_location"],
            [_plain(entry) for entry in sharding["codecs"]],
            [_plain(entry) for entry in sharding["index_codecs"]],
        ]
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise _corrupt(path, f"not the metadata of a zarr array ({error!r})") from error
    chunk = [pipeline.chunk_items, *shape[1:]]
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    inner = [little if np.dtype(dtype).itemsize > 1 else {"name": "bytes"}, *pipeline.compressors]
    expected = [3, "array", list(shape), dtype, "sharding_indexed", chunk, "end", inner, [little, {"name": "crc32c"}]]
    if found != expected:
        raise _corrupt(path, f"expected {expected}, found {found}")


def _plain(codec: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in codec.items() if value != {}}


def _corrupt(path: Path, problem: str) -> CacheCorrupt:
    return CacheCorrupt(f"{path}: {problem}; the file is damaged, `dflash cache repair` makes it again")
