"""The arrays of one shard as a zarr v3 group: their schema, writing them, reading token ranges of them.

N tokens, R rows, H hidden, K top tokens, U bytes of row ids.

zarr fills a chunk that is missing with zeros. Here that cannot happen: every chunk is really stored (also one of
zeros), and before a read the file's size, the array's metadata and the shard's index are checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CacheCorrupt, DflashError
from .codecs import pipeline_for
from .identity import Identity
from .layout import chunk_file, file_size, states_name
from .record import ShardRecord, check_size, digest_file

Array = NDArray[Any]
Run = tuple[int, int]
STORED_DTYPE = {"bfloat16": "uint16", "float32": "float32"}
INDEX_ENTRY_BYTES = 16
INDEX_CHECKSUM_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """Name, shape, stored dtype, kind of pipeline and attributes of one array."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str = "small"
    attributes: dict[str, Any] = field(default_factory=dict)

    def chunk_items(self, codec: str) -> int:
        """Items of the first axis in one inner chunk: never more than the array has."""
        return min(pipeline_for(codec, self.kind).chunk_items, self.shape[0])


def shard_schema(
    identity: Identity, hidden_size: int, num_tokens: int, num_rows: int, num_id_bytes: int
) -> dict[str, ArraySpec]:
    """Return the arrays of a shard by name. A shard without rows has none."""
    if num_rows == 0:
        return {}
    top = (num_tokens, identity.top_k)
    specs = [
        ArraySpec(name="tokens", shape=(num_tokens,), dtype="int32"),
        ArraySpec(name="loss_mask", shape=(num_tokens,), dtype="uint8"),
        ArraySpec(name="row_offsets", shape=(num_rows + 1,), dtype="int64"),
        ArraySpec(name="row_ids", shape=(num_id_bytes,), dtype="uint8", attributes={"encoding": "utf-8"}),
        ArraySpec(name="row_id_offsets", shape=(num_rows + 1,), dtype="int64"),
        ArraySpec(name="top_ids", shape=top, dtype="int32"),
        ArraySpec(name="top_logprobs", shape=top, dtype="float32"),
    ]
    names = [states_name(layer) for layer in identity.layer_ids] + (["final"] if identity.keep_final else [])
    for name in names:
        specs.append(
            ArraySpec(
                name=name,
                shape=(num_tokens, hidden_size),
                dtype=STORED_DTYPE[identity.dtype],
                kind="states",
                attributes={"dtype": identity.dtype},
            )
        )
    return {spec.name: spec for spec in specs}


def create_group(directory: Path) -> Any:
    """Make an empty zarr v3 group in a folder."""
    import zarr
    from zarr.storage import LocalStore

    return zarr.create_group(store=LocalStore(directory), zarr_format=3)


def write_array(group: Any, spec: ArraySpec, codec: str, data: Array) -> None:
    """Write one array whole, as one zarr shard with every inner chunk stored."""
    if data.shape != spec.shape or data.dtype != np.dtype(spec.dtype):
        raise ValueError(f"array {spec.name}: expected {spec.shape} {spec.dtype}, got {data.shape} {data.dtype}")
    pipeline = pipeline_for(codec, spec.kind)
    chunk = (spec.chunk_items(codec), *spec.shape[1:])
    whole = (-(-spec.shape[0] // chunk[0]) * chunk[0], *spec.shape[1:])
    array = group.create_array(
        spec.name,
        shape=spec.shape,
        dtype=spec.dtype,
        chunks=chunk,
        shards=whole,
        filters=pipeline.filters,
        compressors=pipeline.compressors,
        fill_value=0,
        attributes=spec.attributes,
        config={"write_empty_chunks": True},
    )
    array[...] = data


class ShardArrays:
    """Reads the arrays of one shard, checking each file before it is used. Holds no open file."""

    def __init__(self, directory: Path, record: ShardRecord, schema: dict[str, ArraySpec], codec: str) -> None:
        self.directory = directory
        self.record = record
        self.schema = schema
        self.codec = codec
        self._opened: dict[str, Any] = {}

    def read(self, name: str, runs: Sequence[Run]) -> list[Array]:
        """Read ranges of an array's first axis; widen them to chunks first (`chunk_runs`) to decode each chunk once.

        Raises:
            CacheMissing: a file is gone.
            CacheCorrupt: a file is not what the record says, or a chunk's checksum does not fit.
        """
        path = self._data_file(name)
        array = self._opened.get(name)
        if array is None:
            array = self._opened[name] = self._open(name, path)
        try:
            pieces = [np.asarray(array[start:stop]) for start, stop in runs]
        except (MemoryError, DflashError):
            raise
        except Exception as error:  # zarr and its codecs raise whatever they like on damaged bytes
            raise CacheCorrupt(
                f"{path}: cannot be decoded ({_first_line(error)}); the file is damaged, extract the cache again"
            ) from error
        self._data_file(name)  # still there: a file that went away between check and read would have read as zeros
        return pieces

    def chunk_runs(self, name: str, ranges: Sequence[Run]) -> list[Run]:
        """Return the fewest runs of whole inner chunks that cover sorted ranges, so that no chunk is decoded twice."""
        spec = self.schema[name]
        chunk, end = spec.chunk_items(self.codec), spec.shape[0]
        runs: list[Run] = []
        for first, last in ranges:
            start, stop = first // chunk * chunk, min(-(-last // chunk) * chunk, end)
            if runs and start <= runs[-1][1]:
                runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
            else:
                runs.append((start, stop))
        return runs

    def _data_file(self, name: str) -> Path:
        return self._checked(chunk_file(name, len(self.schema[name].shape)))

    def _checked(self, file: str) -> Path:
        if file not in self.record.files:
            raise CacheCorrupt(f"{self.directory}: its record does not list {file}; the cache is damaged")
        return check_size(self.directory, file, self.record.files[file])

    def _open(self, name: str, data_path: Path) -> Any:
        """Open an array after checking its metadata against the record's digest and the schema, and its index."""
        import zarr
        from zarr.storage import LocalStore

        spec = self.schema[name]
        metadata = f"{name}/zarr.json"
        path = self._checked(metadata)
        if digest_file(path) != self.record.files[metadata]:
            raise CacheCorrupt(f"{path}: its content has changed; the cache is damaged, extract it again")
        try:
            array = zarr.open_array(store=LocalStore(self.directory, read_only=True), path=name, mode="r")
            found = (array.shape, str(array.dtype), array.chunks, array.shards, dict(array.attrs))
        except Exception as error:
            raise CacheCorrupt(f"{path}: not the metadata of a zarr array ({_first_line(error)})") from error
        chunk = (spec.chunk_items(self.codec), *spec.shape[1:])
        num_chunks = -(-spec.shape[0] // chunk[0])
        expected = (spec.shape, spec.dtype, chunk, (num_chunks * chunk[0], *spec.shape[1:]), spec.attributes)
        if found != expected:
            raise CacheCorrupt(f"{path}: expected shape, dtype, chunks, shards, attributes {expected}, found {found}")
        _check_index(data_path, num_chunks)
        return array


def _check_index(path: Path, num_chunks: int) -> None:
    """Check that the index at the end of a zarr shard has an entry for every chunk, inside the file.

    zarr checks the index' own crc32c when it reads; but it takes an empty entry for a chunk of zeros.
    """
    index_bytes = num_chunks * INDEX_ENTRY_BYTES
    size = file_size(path) or 0
    data_bytes = size - index_bytes - INDEX_CHECKSUM_BYTES
    if data_bytes < num_chunks:
        raise CacheCorrupt(f"{path}: {size} bytes are too few for {num_chunks} chunks; the cache is damaged")
    with path.open("rb") as file:
        file.seek(data_bytes)
        index = np.frombuffer(file.read(index_bytes), dtype="<u8").reshape(num_chunks, 2)
    offsets, lengths = index[:, 0], index[:, 1]
    if (offsets > data_bytes).any() or (lengths > data_bytes).any() or (offsets + lengths > data_bytes).any():
        raise CacheCorrupt(f"{path}: the index names chunks that are not in the file; the cache is damaged")
    if (lengths == 0).any():
        raise CacheCorrupt(f"{path}: the index lacks chunks; the cache is damaged")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
