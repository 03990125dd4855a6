"""The record of one shard: its commit. Rows, tokens, dropped rows, files with size and digest, layer statistics.

Nothing in it depends on time, place, machine or versions: equal data gives an equal record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ..errors import CacheCorrupt, CacheMissing
from .jsonfile import Fields, canonical_bytes, digest_bytes, parse_sealed, read_bytes, seal
from .layout import FORMAT_VERSION, RECORD, file_size, is_plain, safe_join

READ_BYTES = 2**22


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and xxh3-128 digest of one file."""

    num_bytes: int
    xxh3: str


@dataclass(frozen=True, kw_only=True)
class LayerStats:
    """Statistics of one layer's stored values. Mean and RMS cover the finite ones."""

    values: int
    zeros: int
    nans: int
    infs: int
    mean: float
    rms: float

    @property
    def finite(self) -> int:
        """Number of finite values."""
        return self.values - self.nans - self.infs


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """What one shard holds. `dropped` maps a reason to row ids; `files` maps paths inside the shard to records."""

    shard: int
    num_rows: int
    num_tokens: int
    dropped: dict[str, list[str]]
    files: dict[str, FileRecord]
    layers: dict[int, LayerStats]

    def fields(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        return {
            "shard": self.shard,
            "rows": self.num_rows,
            "tokens": self.num_tokens,
            "dropped": {reason: list(ids) for reason, ids in self.dropped.items()},
            "files": file_fields(self.files),
            "layers": {str(layer): vars(stats) for layer, stats in self.layers.items()},
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of the shard, its record apart."""
        return sum(file.num_bytes for file in self.files.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of the captured layers as stored."""
        return sum(file.num_bytes for name, file in self.files.items() if name.startswith("states/"))


def file_fields(files: dict[str, FileRecord]) -> dict[str, Any]:
    """Return file records as plain JSON values."""
    return {name: {"bytes": file.num_bytes, "xxh3": file.xxh3} for name, file in files.items()}


def parse_files(source: Fields) -> dict[str, FileRecord]:
    """Read file records from untrusted JSON; every path must be a plain one inside its folder."""
    files = {}
    for name in source.values:
        if not is_plain(name):
            source.fail("", "plain paths inside the folder", name)
        entry = source.child(name)
        entry.only("bytes", "xxh3")
        files[name] = FileRecord(num_bytes=entry.integer("bytes"), xxh3=entry.hexadecimal("xxh3"))
    return files


def parse_layers(source: Fields, layer_ids: tuple[int, ...]) -> dict[int, LayerStats]:
    """Read layer statistics from untrusted JSON; they must be those of exactly these layers."""
    if set(source.values) != {str(layer) for layer in layer_ids}:
        source.fail("", f"statistics of the layers {list(layer_ids)}", sorted(source.values))
    layers = {}
    for layer in layer_ids:
        entry = source.child(str(layer))
        entry.only("values", "zeros", "nans", "infs", "mean", "rms")
        stats = LayerStats(
            **{key: entry.integer(key) for key in ("values", "zeros", "nans", "infs")},
            mean=entry.number("mean"),
            rms=entry.number("rms"),
        )
        if stats.zeros + stats.nans + stats.infs > stats.values or not stats.rms >= 0:
            entry.fail("", "counts within the number of values", vars(stats))
        layers[layer] = stats
    return layers


def parse_record(source: Fields, layer_ids: tuple[int, ...]) -> ShardRecord:
    """Read a shard's record from untrusted JSON."""
    source.only("format", "digest", "shard", "rows", "tokens", "dropped", "files", "layers")
    dropped = source.child("dropped")
    return ShardRecord(
        shard=source.integer("shard"),
        num_rows=source.integer("rows"),
        num_tokens=source.integer("tokens"),
        dropped={reason: dropped.texts(reason) for reason in dropped.values},
        files=parse_files(source.child("files")),
        layers=parse_layers(source.child("layers"), layer_ids),
    )


def parse_commit(data: bytes, path: Path | str, layer_ids: tuple[int, ...]) -> ShardRecord:
    """Read the bytes of a record.json, wherever they came from.

    Raises:
        CacheCorrupt: they are damaged; the message names `path`.
    """
    source = parse_sealed(data, path)
    source.integer("format", FORMAT_VERSION, FORMAT_VERSION)
    return parse_record(source, layer_ids)


def write_record(directory: Path, record: ShardRecord) -> None:
    """Write record.json into a shard's folder (which is not in its final place yet)."""
    (directory / RECORD).write_bytes(seal({"format": FORMAT_VERSION, **record.fields()}))


def read_record(directory: Path, layer_ids: tuple[int, ...], expected: ShardRecord | None = None) -> ShardRecord:
    """Read a shard's record.

    Raises:
        CacheMissing: there is none.
        CacheCorrupt: it is damaged, or not the expected one.
    """
    cache = directory.parent.parent
    path = safe_join(cache, (directory / RECORD).relative_to(cache).as_posix())
    record = parse_commit(read_bytes(path), path, layer_ids)
    if expected is not None and record != expected:
        raise CacheCorrupt(
            f"{directory / RECORD}: not the record in the manifest: this shard is another cache's, or was made again "
            "by an interrupted repair; `dflash cache repair` makes it again"
        )
    return record


def digest_file(path: Path) -> FileRecord:
    """Return size and digest of a file, read in pieces."""
    digest = xxhash.xxh3_128()
    size = 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            size += len(block)
    return FileRecord(num_bytes=size, xxh3=digest.hexdigest())


def record_files(directory: Path) -> dict[str, FileRecord]:
    """Return the records of all files below a folder, by their path inside it, sorted."""
    paths = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return {name: digest_file(directory / name) for name in paths}


def check_size(directory: Path, name: str, record: FileRecord) -> Path:
    """Check that a recorded file is there with its recorded size, and return its path.

    Raises:
        CacheMissing: it is gone.
        CacheCorrupt: it has another size.
    """
    path = safe_join(directory, name)
    size = file_size(path)
    if size is None:
        raise CacheMissing(f"{path}: missing; the cache is damaged, `dflash cache repair` makes it again")
    if size != record.num_bytes:
        raise CacheCorrupt(
            f"{path}: expected {record.num_bytes} bytes, found {size}; `dflash cache repair` makes it again"
        )
    return path


def check_file(directory: Path, name: str, record: FileRecord) -> Path:
    """Check that a recorded file is there with its recorded size and content, and return its path.

    Raises:
        CacheMissing: it is gone, or may not be read.
        CacheCorrupt: its size or content is another.
    """
    path = check_size(directory, name, record)
    try:
        found = digest_file(path)
    except OSError as error:
        raise CacheMissing(f"{path}: cannot be read ({error.strerror or error})") from error
    if found != record:
        raise CacheCorrupt(
            f"{path}: its content is not the recorded one (xxh3 {found.xxh3}, expected {record.xxh3}); "
            "`dflash cache repair` makes it again"
        )
    return path


def fingerprint(identity: str, records: tuple[ShardRecord, ...]) -> str:
    """Return the xxh3-128 over the identity and every shard's rows, dropped rows and file digests."""
    shards = [
        [record.shard, record.num_rows, record.num_tokens, record.dropped, file_fields(record.files)]
        for record in records
    ]
    return digest_bytes(canonical_bytes([FORMAT_VERSION, identity, shards]))


def merge_stats(parts: list[LayerStats]) -> LayerStats:
    """Join the statistics of one layer over shards."""
    finite = sum(part.finite for part in parts)
    total = math.fsum(part.mean * part.finite for part in parts)
    squares = math.fsum(part.rms**2 * part.finite for part in parts)
    return LayerStats(
        values=sum(part.values for part in parts),
        zeros=sum(part.zeros for part in parts),
        nans=sum(part.nans for part in parts),
        infs=sum(part.infs for part in parts),
        mean=total / finite if finite else 0.0,
        rms=math.sqrt(squares / finite) if finite else 0.0,
    )
