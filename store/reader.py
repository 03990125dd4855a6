"""Reads a cache: whole rows out, nothing missing ever reads as zeros.

R rows (dropped ones are not among them), T tokens, H hidden, K top tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import CacheCorrupt, CacheMismatch, ConfigError
from .arrays import ShardArrays, shard_schema
from .codecs import CODECS
from .decode import Array, Run
from .head import TargetHead, read_head
from .jsonfile import parse_json, read_bytes
from .layout import HEAD, MANIFEST, RECORD, TARGET, IntArray, plan_file, shard_dir, shard_file, states_name, stats_file
from .manifest import check_manifest, read_manifest
from .plan import Plan, read_plan
from .record import check_file, read_record
from .rows import TORCH_DTYPES, Row, as_states
from .source import Folder, Mirror, open_source
from .stats import channel_rms, read_sums


def open_cache(path: Path | str) -> CacheReader:
    """Open a complete cache for reading. Writes nothing, and works on a read-only folder.

    Args:
        path: the cache's folder, or its URL: s3://bucket/prefix, gs://bucket/prefix, file:///folder. Files of a bucket
            are fetched when they are needed, into a temporary folder of bounded size (source.py).

    Raises:
        CacheMissing: there is no cache, or a file of it is gone.
        CacheIncomplete: its extraction has not finished; the message says how far it is and how to go on.
        CacheCorrupt: manifest or plan are damaged or do not agree.
        ConfigError: it is of another version of the format; a URL of another scheme, or without the extra `buckets`.
    """
    return CacheReader(open_source(path))


class CacheReader:
    """A complete cache. Rows have indices 0..R-1 in the order of the shards; open it with `open_cache`.

    Picklable: a copy in another process opens the place again and checks that it is the same cache.

    Attributes:
        path: the cache's folder; of a bucket, the folder of what has been fetched.
        place: the folder, or the bucket's URL.
        manifest: its manifest.
        layer_ids, hidden_size, vocab_size, dtype, top_k: what is stored.
        identity, fingerprint: hexadecimal digests of what went in and of what came out.
        num_rows, num_shards: R, and the number of shards.
        row_ids: R strings. num_tokens, num_prompt_tokens, num_anchors, row_shard: [R] int64.
        prompt_hash: [R] uint64.
    """

    def __init__(self, source: Folder | Mirror) -> None:
        self._source = source
        self.path = source.root
        self.place = source.place
        with source.holding(None):
            source.fetch_json(MANIFEST)
            self.manifest = read_manifest(self.path)
            plan = self._read_plan()
        identity = self.manifest.identity
        if identity.codec not in CODECS:
            raise ConfigError(f"{self.place}: codec {identity.codec!r} is not one of: {', '.join(CODECS)}")
        self.layer_ids = identity.layer_ids
        self.hidden_size = self.manifest.hidden_size
        self.vocab_size = self.manifest.vocab_size
        self.dtype = TORCH_DTYPES[identity.dtype]
        self.top_k = identity.top_k
        self.identity = self.manifest.identity_digest
        self.fingerprint = self.manifest.fingerprint
        self.num_shards = self.manifest.num_shards
        self._keep_rows(plan)
        self._arrays: dict[int, ShardArrays] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.place, self.fingerprint)

    def read_row(
        self, index: int, *, layer_ids: Sequence[int] | None = None, top_k: bool = True, final: bool = False
    ) -> Row:
        """Read one row. Decodes the chunks it touches; `read_shard` is far cheaper for many rows.

        Raises:
            As `read_shard`.
        """
        if not 0 <= index < self.num_rows:
            raise ConfigError(f"row {index}: the cache has rows 0 to {self.num_rows - 1}")
        shard = int(self.row_shard[index])
        return self.read_shard(shard, layer_ids=layer_ids, rows=[index], top_k=top_k, final=final)[0]

    def read_shard(
        self,
        shard: int,
        *,
        layer_ids: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
        top_k: bool = True,
        final: bool = False,
    ) -> list[Row]:
        """Read rows of one shard in one pass; every chunk is read and decoded at most once.

        Args:
            shard: 0..num_shards-1.
            layer_ids: the layers wanted, None for all; others are not touched.
            rows: global row indices, all in this shard, None for all of its rows; any order.
            top_k: whether top_ids and top_logprobs are wanted (else K = 0).
            final: whether the final state is wanted.

        Returns:
            The rows in the order asked for. Their tensors are views of the arrays read: a row kept for long keeps
            its neighbours in memory; clone it.

        Raises:
            ConfigError: a row, layer or the final state is not in this shard or cache.
            CacheMissing: a file is gone.
            CacheCorrupt: a file is not what the manifest says, or a checksum does not fit.
        """
        if not 0 <= shard < self.num_shards:
            raise ConfigError(f"shard {shard}: the cache has shards 0 to {self.num_shards - 1}")
        layers = self._wanted_layers(layer_ids)
        if final and not self.manifest.identity.keep_final:
            raise ConfigError(f"{self.place}: the final state was not kept (extract with --keep-final)")
        first, last = int(self._shard_rows[shard]), int(self._shard_rows[shard + 1])
        wanted = list(range(first, last)) if rows is None else [int(row) for row in rows]
        for row in wanted:
            if not first <= row < last:
                raise ConfigError(f"row {row}: shard {shard} has the rows {first} to {last - 1}")
        if not wanted:
            return []
        names = ["tokens", "loss_mask", *map(states_name, layers)]
        names += ["top_ids", "top_logprobs"] * top_k + ["final"] * final
        starts = self._offsets - self._offsets[first]
        ranges = [(int(starts[row]), int(starts[row + 1])) for row in wanted]
        with self._source.holding(shard):
            arrays = self._shard_arrays(shard)
            self._source.fetch({shard_file(shard, name): size for name, size in arrays.files(names).items()})
            columns = {name: self._read_ranges(arrays, name, ranges) for name in names}
        return [
            self._row(row, {name: columns[name][place] for name in names}, layers) for place, row in enumerate(wanted)
        ]

    def head(self) -> TargetHead:
        """Read the target's head: embeddings, output head and final norm.

        Raises:
            CacheMissing, CacheCorrupt: the file is gone or damaged.
        """
        self._checked(f"{TARGET}/{HEAD}")
        return read_head(self.path, self.hidden_size, self.vocab_size)

    def target_config(self) -> dict[str, Any]:
        """Return the target's config.json."""
        path = self._checked(f"{TARGET}/config.json")
        return parse_json(read_bytes(path), path).values

    @cached_property
    def target_dir(self) -> Path:
        """The folder of the target's config, tokenizer and chat template, each checked against its digest.

        Raises:
            CacheMissing, CacheCorrupt: a file of it is gone or changed.
        """
        for name in self.manifest.files:
            if name.startswith(f"{TARGET}/") and name != f"{TARGET}/{HEAD}":
                self._checked(name)
        for path in (self.path / TARGET).rglob("*"):
            name = path.relative_to(self.path).as_posix()
            if name not in self.manifest.files and (path.is_symlink() or not path.is_dir()):
                raise CacheCorrupt(f"{path}: {MANIFEST} does not list this file; remove it")
        return self.path / TARGET

    def _checked(self, name: str) -> Path:
        """Return the path of a file outside the shards after checking its size and digest."""
        if name not in self.manifest.files:
            raise CacheCorrupt(f"{self.place}/{MANIFEST}: files: expected a record of {name}, found none")
        with self._source.holding(None):
            self._source.fetch({name: self.manifest.files[name].num_bytes})
            return check_file(self.path, name, self.manifest.files[name])

    def channel_stats(self, layer_id: int) -> dict[str, float]:
        """Return mean, rms, values, zeros, nans and infs of one layer's stored states."""
        (layer,) = self._wanted_layers([layer_id])
        return dict(vars(self.manifest.layers[layer]))

    def channel_rms(self, layer_id: int) -> Tensor:
        """Return the root mean square of each channel of one layer, [H] float32.

        Raises:
            CacheMissing, CacheCorrupt: stats.safetensors is gone or damaged.
        """
        (layer,) = self._wanted_layers([layer_id])
        name = stats_file(self.manifest.generation)
        self._checked(name)
        sums = read_sums(self.path, self.layer_ids, self.hidden_size, name)
        return channel_rms(sums[layer], self.manifest.num_tokens)

    # --- opening ------------------------------------------------------------------------------------------------

    def _read_plan(self) -> Plan:
        generation = self.manifest.generation
        self._checked(plan_file(generation))
        plan = read_plan(self.path, generation)
        check_manifest(self.path, self.manifest, plan)
        return plan

    def _keep_rows(self, plan: Plan) -> None:
        """Take the plan's columns without the dropped rows (`check_manifest` has seen that they are in the plan)."""
        dropped = {name for record in self.manifest.shards for ids in record.dropped.values() for name in ids}
        keep = np.asarray([name not in dropped for name in plan.row_ids], dtype=np.bool_)
        shards = np.repeat(np.arange(plan.num_shards, dtype=np.int64), plan.shard_rows)
        self.row_ids = [name for name, kept in zip(plan.row_ids, keep, strict=True) if kept]
        self.num_rows = len(self.row_ids)
        self.num_tokens: IntArray = plan.num_tokens[keep]
        self.num_prompt_tokens: IntArray = plan.num_prompt_tokens[keep]
        self.num_anchors: IntArray = plan.num_anchors[keep]
        self.prompt_hash: NDArray[np.uint64] = np.asarray([int(text, 16) for text in plan.prompt_hash], np.uint64)[keep]
        self.row_shard: IntArray = shards[keep]
        self._offsets: IntArray = np.concatenate([[0], np.cumsum(self.num_tokens)]).astype(np.int64)
        self._shard_rows: IntArray = np.searchsorted(self.row_shard, np.arange(self.num_shards + 1)).astype(np.int64)

    # --- reading ------------------------------------------------------------------------------------------------

    def _wanted_layers(self, layer_ids: Sequence[int] | None) -> tuple[int, ...]:
        layers = self.layer_ids if layer_ids is None else tuple(layer_ids)
        unknown = [layer for layer in layers if layer not in self.layer_ids]
        if unknown:
            raise ConfigError(f"{self.place}: layer {unknown[0]} is not in the cache, it has {list(self.layer_ids)}")
        return layers

    def _shard_arrays(self, shard: int) -> ShardArrays:
        arrays = self._arrays.get(shard)
        if arrays is None:
            record = self.manifest.shards[shard]
            directory = shard_dir(self.path, shard)
            self._source.fetch_json(shard_file(shard, RECORD))
            read_record(directory, self.layer_ids, expected=record)
            first, last = int(self._shard_rows[shard]), int(self._shard_rows[shard + 1])
            id_bytes = sum(len(name.encode()) for name in self.row_ids[first:last])
            identity = self.manifest.identity
            schema = shard_schema(identity, self.hidden_size, record.num_tokens, record.num_rows, id_bytes)
            arrays = self._arrays[shard] = ShardArrays(directory, record, schema, identity.codec)
        return arrays

    def _read_ranges(self, arrays: ShardArrays, name: str, ranges: list[Run]) -> list[Array]:
        """Read token ranges, in any order, decoding each chunk once; the results are views."""
        runs = arrays.chunk_runs(name, sorted(ranges))
        pieces = arrays.read(name, runs)
        limit = {"loss_mask": 2, "top_ids": self.vocab_size, "tokens": 2**31}.get(name)
        for piece in pieces:
            if limit is not None and (piece.min() < 0 or piece.max() >= limit):
                raise CacheCorrupt(f"{arrays.directory}: {name}: a value outside 0..{limit - 1}; extract it again")
        firsts = np.asarray([start for start, _ in runs])
        found = []
        for start, stop in ranges:
            place = int(np.searchsorted(firsts, start, side="right")) - 1
            offset = runs[place][0]
            found.append(pieces[place][start - offset : stop - offset])
        return found

    def _row(self, row: int, columns: dict[str, Array], layers: tuple[int, ...]) -> Row:
        dtype = self.manifest.identity.dtype
        num_tokens = int(self.num_tokens[row])
        top_ids, top_logprobs = columns.get("top_ids"), columns.get("top_logprobs")
        return Row(
            id=self.row_ids[row],
            tokens=torch.from_numpy(columns["tokens"]),
            loss_mask=torch.from_numpy(columns["loss_mask"]).view(torch.bool),
            states={layer: as_states(columns[states_name(layer)], dtype) for layer in layers},
            top_ids=torch.zeros(num_tokens, 0, dtype=torch.int32) if top_ids is None else torch.from_numpy(top_ids),
            top_logprobs=torch.zeros(num_tokens, 0) if top_logprobs is None else torch.from_numpy(top_logprobs),
            final=as_states(columns["final"], dtype) if "final" in columns else None,
        )


def _reopen(path: Path | str, fingerprint: str) -> CacheReader:
    reader = open_cache(path)
    if reader.fingerprint != fingerprint:
        raise CacheMismatch(f"{path}: another cache is there now (fingerprint {reader.fingerprint}, was {fingerprint})")
    return reader
