"""The arrays of one shard, a zarr v3 group: their schema, and reading token ranges of them.

N tokens, R rows, H hidden, K top tokens, U bytes of row ids.

zarr fills a chunk that is missing with zeros. Here that cannot happen: every chunk is really stored (also one of
zeros), and the reader checks files, metadata and index before it decodes (decode.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CacheCorrupt
from .codecs import Pipeline, pipeline_for
from .decode import Array, Run, check_metadata, read_runs
from .identity import Identity
from .layout import chunk_file, safe_join, states_name
from .record import FileRecord, ShardRecord, check_file

STORED_DTYPE = {"bfloat16": "uint16", "float32": "float32"}


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """Name, shape, stored dtype and attributes of one array."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    attributes: dict[str, Any] = field(default_factory=dict)

    def pipeline(self, codec: str) -> Pipeline:
        """Return how the array is cut and coded."""
        return pipeline_for(codec, self.shape, self.dtype)


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
                attributes={"dtype": identity.dtype},
            )
        )
    return {spec.name: spec for spec in specs}


class ShardArrays:
    """Reads the arrays of one shard, checking each file before it is used. Holds no open file."""

    def __init__(self, directory: Path, record: ShardRecord, schema: dict[str, ArraySpec], codec: str) -> None:
        self.directory = directory
        self.record = record
        self.schema = schema
        self.codec = codec
        self._checked: set[str] = set()

    def read(self, name: str, runs: Sequence[Run]) -> list[Array]:
        """Read ranges of an array's first axis, as `chunk_runs` gives them.

        Raises:
            CacheMissing: a file is gone.
            CacheCorrupt: a file is not what the record says, or a checksum does not fit.
        """
        spec = self.schema[name]
        if name not in self._checked:
            self._check_metadata(spec)
            self._checked.add(name)
        file = chunk_file(name, len(spec.shape))
        path, size = safe_join(self.directory, file), self._recorded(file).num_bytes
        return read_runs(path, size, spec.shape, spec.dtype, spec.pipeline(self.codec), runs)

    def files(self, names: Sequence[str]) -> dict[str, int]:
        """Return the files that reading these arrays takes, with their recorded sizes."""
        files = [
            file for name in names for file in (f"{name}/zarr.json", chunk_file(name, len(self.schema[name].shape)))
        ]
        return {file: self._recorded(file).num_bytes for file in files}

    def chunk_runs(self, name: str, ranges: Sequence[Run]) -> list[Run]:
        """Return the fewest runs of whole inner chunks that cover sorted ranges, so that no chunk is decoded twice."""
        spec = self.schema[name]
        chunk, end = spec.pipeline(self.codec).chunk_items, spec.shape[0]
        runs: list[Run] = []
        for first, last in ranges:
            start, stop = first // chunk * chunk, min(-(-last // chunk) * chunk, end)
            if runs and start <= runs[-1][1]:
                runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
            else:
                runs.append((start, stop))
        return runs

    def _recorded(self, file: str) -> FileRecord:
        if file not in self.record.files:
            raise CacheCorrupt(f"{self.directory}: its record does not list {file}; the cache is damaged")
        return self.record.files[file]

    def _check_metadata(self, spec: ArraySpec) -> None:
        """Check an array's metadata against the record's digest and against the schema."""
        file = f"{spec.name}/zarr.json"
        recorded = self._recorded(file)
        path = check_file(self.directory, file, recorded)
        check_metadata(path, spec.shape, spec.dtype, spec.pipeline(self.codec))
