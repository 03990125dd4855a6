"""Putting files of a finished cache in place again: one shard, the target's folder, the manifest.

At every moment a reader sees the old state, the new one, or an error that names the shard: a new shard beside an old
manifest has another record than the manifest says, unless it is the same to the last bit.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .claims import Claims, exclusive
from .durable import commit_dir, explained, filling_dir, fsync_path, remove_stale, temporary_name
from .head import TargetHead, write_head
from .layout import SHARDS, TARGET, TEMP_PREFIX, shard_dir, shard_name
from .manifest import Manifest, build_manifest, write_manifest
from .plan import Plan
from .record import ShardRecord, record_files, write_record
from .rows import Row
from .shard import order_rows, write_shard_files
from .stats import write_totals

OLD = "old-"
"""Marks what stood in a place before."""
STALE_SHARD = re.compile(rf"{re.escape(TEMP_PREFIX)}({OLD})?(?P<shard>[0-9]+)-")


@contextmanager
def replacing(cache: Path) -> Iterator[None]:
    """Hold the cache's lock, and clear away what killed writers left.

    Raises:
        DflashError: another process holds the lock, or the folder may not be written.
    """
    with explained(cache), exclusive(cache, wait_seconds=0):
        remove_stale(cache)
        _remove_stale_shards(cache)
        yield


def _remove_stale_shards(cache: Path) -> None:
    """Remove what lies beside the places of shards, but for those that another writer holds: it is at work there."""
    claims = Claims(cache)
    found = (STALE_SHARD.match(path.name) for path in (cache / SHARDS).glob(f"{TEMP_PREFIX}*"))
    for shard in sorted({int(name["shard"]) for name in found if name}):
        if claims.take(shard):
            remove_stale(cache / SHARDS, shard_name(shard))
            remove_stale(cache / SHARDS, f"{OLD}{shard_name(shard)}")
            claims.release(shard)


def replace_shard(
    cache: Path, plan: Plan, shard: int, rows: list[Row], dropped: Mapping[str, list[str]]
) -> ShardRecord:
    """Write a shard beside its place and put it there, also where a damaged one is.

    Raises:
        CacheMismatch: the rows are not those of the plan.
        DflashError: the disk is full.
    """
    ordered = order_rows(plan, shard, rows, dropped)
    with explained(cache):
        (cache / SHARDS).mkdir(exist_ok=True)
        with filling_dir(shard_dir(cache, shard), _swap_dir) as temporary:
            record = write_shard_files(temporary, plan, shard, ordered, dropped)
            write_record(temporary, record)
    return record


def replace_target(cache: Path, head: TargetHead, target_files: Callable[[Path], None]) -> None:
    """Write the target's head, config and tokenizer again."""
    with explained(cache), filling_dir(cache / TARGET, _swap_dir) as temporary:
        write_head(temporary, head)
        target_files(temporary)


def replace_manifest(
    cache: Path, plan: Plan, old: Manifest, records: Mapping[int, ShardRecord], versions: Mapping[str, str]
) -> Manifest:
    """Write statistics and manifest again after shards or files were replaced; return the manifest.

    The identity stays. Where a new record differs from the old one the fingerprint changes, and the old one becomes
    the last of the parents.

    Args:
        records: the new records by shard; the others stay.
        versions: of the packages that made the new shards, where any differs from the old record.
    """
    shards = tuple(records.get(record.shard, record) for record in old.shards)
    with explained(cache):
        files = {f"{TARGET}/{name}": record for name, record in record_files(cache / TARGET).items()}
        files |= write_totals(cache, plan, shards)
        same = shards == old.shards
        parents = old.parents if same else (*old.parents, old.fingerprint)
        manifest = build_manifest(plan, shards, files, old.versions if same else versions, parents)
        write_manifest(cache, manifest)
    return manifest


def _swap_dir(temporary: Path, final: Path) -> None:
    """Commit a folder to its place; what was there is moved aside first and removed afterwards."""
    aside = final.with_name(temporary_name(f"{OLD}{final.name}"))
    if final.is_symlink() or final.is_file():
        final.unlink()
    moved = final.exists()
    if moved:
        final.rename(aside)
        fsync_path(final.parent)
    commit_dir(temporary, final)
    if moved:
        shutil.rmtree(aside)
