"""Checking a whole cache against its digests, and describing it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import CacheCorrupt, CacheMissing
from .layout import RECORD, shard_dir
from .manifest import check_manifest, read_manifest
from .plan import read_plan
from .record import FileRecord, check_size, digest_file, read_record


def verify(path: Path | str) -> dict[str, Any]:
    """Read every file of a cache and compare it with its recorded digest.

    Returns:
        {"ok": bool, "bad_shards": [numbers], "problems": [one line each], "files": int, "bytes": int}.

    Raises:
        CacheMissing, CacheIncomplete, CacheCorrupt: there is no complete cache whose manifest can be trusted.
    """
    cache = Path(path).absolute()
    manifest = read_manifest(cache)
    check_manifest(cache, manifest, read_plan(cache))
    problems = _check_files(cache, manifest.files)
    bad_shards = []
    for record in manifest.shards:
        directory = shard_dir(cache, record.shard)
        found = _check_files(directory, record.files)
        try:
            if read_record(directory, manifest.identity.layer_ids) != record:
                found.append(f"{directory / RECORD}: not the record in the manifest")
        except (CacheCorrupt, CacheMissing) as error:
            found.append(str(error))
        if found:
            bad_shards.append(record.shard)
            problems += found
    return {
        "ok": not problems,
        "bad_shards": bad_shards,
        "problems": problems,
        "files": len(manifest.files) + sum(len(record.files) for record in manifest.shards),
        "bytes": manifest.num_bytes,
    }


def describe(path: Path | str) -> dict[str, Any]:
    """Return the manifest's summary: identity, totals, statistics per layer; without the shard table.

    Raises:
        CacheMissing, CacheIncomplete, CacheCorrupt: as `read_manifest`.
    """
    cache = Path(path).absolute()
    manifest = read_manifest(cache)
    fields = manifest.fields()
    identity = fields.pop("identity")
    for key in ("shards", "files", "identity_digest"):
        del fields[key]
    return {
        "cache": str(cache),
        "identity": manifest.identity_digest,
        **fields,
        "shards": manifest.num_shards,
        "bytes": manifest.num_bytes,
        "inputs": identity,
    }


def _check_files(root: Path, files: dict[str, FileRecord]) -> list[str]:
    problems = []
    for name, record in files.items():
        try:
            path = check_size(root, name, record)
            if digest_file(path) != record:
                problems.append(f"{path}: its content does not have the recorded digest")
        except (CacheCorrupt, CacheMissing, OSError) as error:
            problems.append(str(error))
    return problems
