"""Checking a whole cache against its digests, and describing it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CacheCorrupt, CacheMissing, ConfigError
from .layout import ITEM_BYTES, MANIFEST, RECORD, shard_dir, shard_file
from .manifest import Manifest, check_manifest, read_manifest
from .plan import read_plan
from .progress import Bar, no_bar
from .record import FileRecord, ShardRecord, check_file, read_record
from .source import Folder, Mirror, open_source

MAX_WORKERS = 16


@dataclass(frozen=True)
class _Check:
    """One file to check: its shard (None outside the shards), its name, its size, and what raises if it is bad."""

    shard: int | None
    name: str
    num_bytes: int
    run: Callable[[], object]


def verify(path: Path | str, *, num_workers: int | None = None, bar: Bar = no_bar) -> dict[str, Any]:
    """Read every file of a cache and compare it with its recorded digest.

    Files are read in parallel by threads: hashing and reading both leave the interpreter lock.

    Args:
        path: the cache's folder or URL; of a bucket every file is fetched, and kept within the bound of source.py.
        num_workers: threads; by default one per processor, at most 16.
        bar: where to show progress.

    Returns:
        {"ok": bool, "bad_shards": [numbers], "bad_files": [names outside the shards], "problems": [one line each],
        "files": int, "bytes": int}.

    Raises:
        CacheMissing, CacheIncomplete, CacheCorrupt: there is no complete cache whose manifest can be trusted.
        BucketError, DflashError: the bucket cannot be read, or the disk is full: nothing is said of the cache.
        ConfigError: num_workers is below 1.
    """
    if num_workers is not None and num_workers < 1:
        raise ConfigError(f"num_workers {num_workers}: expected at least 1")
    source = open_source(path)
    manifest = manifest_of(source)
    checks = _checks(source, manifest)
    bad_shards: set[int] = set()
    bad_files, problems = [], []
    with (
        bar("verify", sum(check.num_bytes for check in checks)) as advance,
        _pool(num_workers or min(os.cpu_count() or 1, MAX_WORKERS), source) as pool,
    ):
        for check, problem in zip(checks, pool.map(_problem, checks), strict=True):
            advance(check.num_bytes)
            if problem is None:
                continue
            problems.append(problem)
            if check.shard is None:
                bad_files.append(check.name)
            else:
                bad_shards.add(check.shard)
    if not bad_files:
        check_manifest(source.root, manifest, read_plan(source.root, manifest.generation))
    return {
        "ok": not problems,
        "bad_shards": sorted(bad_shards),
        "bad_files": bad_files,
        "problems": problems,
        "files": len(manifest.files) + sum(len(record.files) for record in manifest.shards),
        "bytes": manifest.num_bytes,
    }


def manifest_of(source: Folder | Mirror) -> Manifest:
    """Read the manifest of a cache, wherever it is.

    Raises:
        CacheMissing, CacheIncomplete, CacheCorrupt: as `read_manifest`.
    """
    with source.holding(None):
        source.fetch_json(MANIFEST)
        return read_manifest(source.root)


def describe(path: Path | str) -> dict[str, Any]:
    """Return the manifest's summary: identity, totals, statistics per layer; without the shard table.

    Added to the manifest's own fields: bytes of the whole cache, bits per stored value, and the ratio of the states'
    stored bytes to their raw ones.

    Raises:
        CacheMissing, CacheIncomplete, CacheCorrupt: as `read_manifest`.
    """
    source = open_source(path)
    manifest = manifest_of(source)
    fields = manifest.fields()
    identity = fields.pop("identity")
    for key in ("shards", "files", "identity_digest"):
        del fields[key]
    num_values = manifest.raw_state_bytes // ITEM_BYTES[manifest.identity.dtype]
    return {
        "cache": str(source.place),
        "identity": manifest.identity_digest,
        **fields,
        "shards": manifest.num_shards,
        "bytes": manifest.num_bytes,
        "bits_per_value": 8 * manifest.state_bytes / num_values if num_values else 0.0,
        "ratio": manifest.state_bytes / manifest.raw_state_bytes if num_values else 0.0,
        "inputs": identity,
    }


def _checks(source: Folder | Mirror, manifest: Manifest) -> list[_Check]:
    """Return a check per file, and one per shard that its record is the one in the manifest."""
    checks = [_file_check(source, None, name, record) for name, record in manifest.files.items()]
    for record in manifest.shards:
        checks.append(_record_check(source, record, manifest.identity.layer_ids))
        checks += [_file_check(source, record.shard, name, file) for name, file in record.files.items()]
    return checks


def _file_check(source: Folder | Mirror, shard: int | None, name: str, record: FileRecord) -> _Check:
    root = source.root if shard is None else shard_dir(source.root, shard)

    def run() -> None:
        with source.holding(shard):
            source.fetch({name if shard is None else shard_file(shard, name): record.num_bytes})
            check_file(root, name, record)

    return _Check(shard, name, record.num_bytes, run)


def _record_check(source: Folder | Mirror, record: ShardRecord, layer_ids: tuple[int, ...]) -> _Check:
    def run() -> None:
        with source.holding(record.shard):
            source.fetch_json(shard_file(record.shard, RECORD))
            read_record(shard_dir(source.root, record.shard), layer_ids, expected=record)

    return _Check(record.shard, RECORD, 0, run)


def _problem(check: _Check) -> str | None:
    """Return what is wrong with a file. A bucket or a disk that fails says nothing about it, and ends the check."""
    try:
        check.run()
    except (CacheMissing, CacheCorrupt) as error:
        return str(error)
    return None


@contextmanager
def _pool(num_workers: int, source: Folder | Mirror) -> Iterator[ThreadPoolExecutor]:
    """Give a pool that drops what it has not begun when the block fails."""
    with ThreadPoolExecutor(num_workers) as pool:
        try:
            yield pool
        except BaseException:
            source.give_up()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
