"""Putting a cache into a bucket: the plan, shard by shard, the manifest last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import CacheMismatch, ConfigError
from .bucket import Bucket, is_url
from .jsonfile import seal
from .layout import CLAIMS, MANIFEST, PLAN, RECORD, plan_file, shard_dir, shard_file
from .manifest import check_manifest, read_manifest
from .plan import Plan, read_plan
from .progress import Bar, no_bar
from .record import ShardRecord, check_file, read_record


def publish_cache(cache: Path | str, url: Path | str, *, bar: Bar = no_bar) -> dict[str, Any]:
    """Copy a finished cache under a URL; run again, it goes on where it stopped, and puts again what is gone since.

    A shard is published by its record: its other files are put first, each whole, and nobody reads a shard without its
    record, or a cache without its manifest, which is put last. Every file is checked against its digest before it goes.

    Returns:
        cache, url, shards, resumed_shards (were there already), bytes (put by this run), fingerprint.

    Raises:
        CacheMismatch: another cache is there.
        CacheMissing, CacheIncomplete, CacheCorrupt: the cache is not complete and sound.
        ConfigError, DflashError: the URL is not valid, or the bucket cannot be written.
    """
    if not is_url(url):
        raise ConfigError(
            f"{url}: a cache is published under a URL: s3://bucket/prefix, gs://bucket/prefix, file:///folder"
        )
    url, root = str(url), Path(cache).absolute()
    manifest = read_manifest(root)
    check_manifest(root, manifest, read_plan(root, manifest.generation))
    bucket = Bucket(url, create=True)
    plans = [name for name in map(plan_file, range(manifest.generation + 1)) if (root / name).is_file()]
    _refuse_another(bucket, root, plans[0])
    put_bytes = resumed = 0
    with bar("publish", manifest.num_bytes) as advance:
        for name in plans:
            bucket.upload(name, root / name)
        for name, record in manifest.files.items():
            path = check_file(root, name, record)
            bucket.upload(name, path)
            put_bytes += record.num_bytes
            advance(record.num_bytes)
        for shard in manifest.shards:
            directory = shard_dir(root, shard.shard)
            read_record(directory, manifest.identity.layer_ids, expected=shard)
            commit = (directory / RECORD).read_bytes()
            files = {shard_file(shard.shard, name): record.num_bytes for name, record in shard.files.items()}
            there = bucket.sizes(shard_file(shard.shard, ""))
            same_sizes = files.items() <= there.items()
            if same_sizes and content(bucket, shard_file(shard.shard, RECORD)) == commit:
                resumed += 1
            else:
                put_shard(bucket, directory, shard)
                put_bytes += shard.num_bytes
            advance(shard.num_bytes)
        bucket.upload(MANIFEST, (root / MANIFEST).read_bytes())
    return {
        "cache": str(root),
        "url": url,
        "shards": manifest.num_shards,
        "resumed_shards": resumed,
        "bytes": put_bytes,
        "fingerprint": manifest.fingerprint,
    }


def _refuse_another(bucket: Bucket, root: Path, plan: str) -> None:
    """Refuse a place where another cache is: the plan it was begun with differs. An extension of the same is fine."""
    there = content(bucket, plan)
    if there is not None and there != (root / plan).read_bytes():
        raise CacheMismatch(f"{bucket.url}: holds another cache (its {plan} differs); use another URL")
    if there is None and bucket.size(MANIFEST) is not None:
        raise CacheMismatch(f"{bucket.url}: holds a {MANIFEST} and no {plan}; use another URL")


def put_shard(bucket: Bucket, directory: Path, record: ShardRecord, confirm: Callable[[], None] | None = None) -> None:
    """Put a shard: its files, each checked against its digest and several at once, then its record.

    Args:
        bucket: where to.
        directory: its folder.
        record: the record in that folder.
        confirm: called before the record goes; what it raises leaves the shard without one.

    Raises:
        CacheMissing, CacheCorrupt: a file is not what the record says.
        DflashError: the bucket cannot be written.
    """

    def put(name: str) -> None:
        bucket.upload(shard_file(record.shard, name), check_file(directory, name, record.files[name]))

    with bucket.pool() as pool:
        list(pool.map(put, record.files))
    if confirm is not None:
        confirm()
    bucket.upload(shard_file(record.shard, RECORD), (directory / RECORD).read_bytes())


def content(bucket: Bucket, name: str) -> bytes | None:
    """Return a JSON file of a cache in a bucket, or None where there is none."""
    found = bucket.look(name)
    return None if found is None else found[0]


def put_plan(bucket: Bucket, plan: Plan) -> None:
    """Put the plan where there is none; where there is one, it is left.

    Raises:
        CacheMismatch: there is something, and no plan.
    """
    if bucket.size(PLAN) is not None:
        return
    strangers = sorted(name for name in bucket.sizes("") if not name.startswith(f"{CLAIMS}/") and name != PLAN)
    if strangers:
        raise CacheMismatch(f"{bucket.url}: holds {strangers[0]!r} and no {PLAN}; use an empty or new place as --out")
    data = seal(plan.fields())
    try:
        bucket.put_if(PLAN, data, None)
    except NotImplementedError:
        bucket.upload(PLAN, data)
