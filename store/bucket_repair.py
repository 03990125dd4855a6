"""Repairing a cache in a bucket: in a local folder that holds what a repair needs, whose new files are then put."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from ..errors import CacheMismatch, DflashError
from .bucket import Bucket
from .durable import explained_temporary
from .integrity import manifest_of
from .layout import MANIFEST, STATS, shard_dir, shard_file
from .leases import FINISH, LEASE_SECONDS, ClaimLost, claims_in
from .manifest import Manifest, read_manifest, write_manifest
from .publish import put_shard
from .record import check_file
from .replace import replacing
from .source import open_source

WAIT_SECONDS = 2 * LEASE_SECONDS  # the claim of a repair that was killed lapses in that time


@contextmanager
def repairing(
    place: Path | str, manifest: Manifest, bad_shards: Sequence[int], bad_files: Sequence[str]
) -> Iterator[Path]:
    """Give the folder of a cache to repair; for one in a bucket, a local one below TMPDIR, put back at the end.

    That folder has the cache's sound files outside the shards and the statistics of the sound shards. Put back are the
    bad shards and files, which must be there at the end, and what else is another now; the manifest is last. As in a
    folder, a reader meanwhile sees the old state, the new one, or an error that names the shard.

    Args:
        place: the cache's folder or URL.
        manifest: its manifest.
        bad_shards, bad_files: what `verify` found.

    Raises:
        CacheMismatch: the cache has another manifest now.
        DflashError: another process is writing or repairing the cache, or the disk or the bucket cannot be written.
        CacheCorrupt, CacheMissing: what was sound has changed meanwhile.
    """
    if isinstance(place, Path):
        with replacing(place):
            _refuse_changed(place, manifest)
            yield place
        return
    bucket = Bucket(place)
    claims = claims_in(bucket, uuid4().hex, LEASE_SECONDS, 0, 1)
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while not claims.take(FINISH):
            if time.monotonic() > deadline:
                raise DflashError(
                    f"{place}: another process is writing or repairing this cache right now (it holds "
                    ".claims/finish); wait for it"
                )
            time.sleep(claims.poll_seconds)
        _refuse_changed(place, manifest)
        with tempfile.TemporaryDirectory(prefix="dflash-repair-") as folder:
            root = Path(folder)
            with explained_temporary("what a repair needs"):
                _fetch(bucket, root, manifest, bad_shards, bad_files)
            with replacing(root):
                yield root
            claims.check(FINISH)
            _put(bucket, root, manifest, bad_shards, bad_files)
    except ClaimLost:
        raise DflashError(f"{place}: not repaired: another process took the cache over; run the same again") from None
    finally:
        claims.release_all()


def _refuse_changed(place: Path | str, manifest: Manifest) -> None:
    if manifest_of(open_source(place)) != manifest:
        raise CacheMismatch(f"{place}: another process has changed this cache meanwhile; run the repair again")


def _fetch(bucket: Bucket, root: Path, manifest: Manifest, bad_shards: Sequence[int], bad_files: Sequence[str]) -> None:
    files = {name: file for name, file in manifest.files.items() if name not in bad_files}
    for shard in manifest.shards:
        if shard.shard not in bad_shards and STATS in shard.files:
            files[shard_file(shard.shard, STATS)] = shard.files[STATS]

    def fetch(name: str) -> None:
        bucket.download(name, root.joinpath(*name.split("/")), files[name].num_bytes)
        check_file(root, name, files[name])

    with bucket.pool() as pool:
        list(pool.map(fetch, files))
    write_manifest(root, manifest)


def _put(bucket: Bucket, root: Path, old: Manifest, bad_shards: Sequence[int], bad_files: Sequence[str]) -> None:
    new = read_manifest(root)
    for shard in bad_shards:
        put_shard(bucket, shard_dir(root, shard), new.shards[shard])
    for name, file in new.files.items():
        if name in bad_files or old.files.get(name) != file:
            bucket.upload(name, check_file(root, name, file))
    bucket.upload(MANIFEST, (root / MANIFEST).read_bytes())
