"""Writes a cache: plan first, then shard after shard, the manifest last. Whatever interrupts it, it goes on.

A shard is written beside its place, flushed, and renamed: it is there whole or not at all. Any number of writers with
the same plan share the work: each claims the shard it works on (claims.py), one at a time begins or finishes. Into a
bucket: bucket_writer.py.

T tokens, N tokens of a shard, H hidden, K top tokens.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import CacheCorrupt, CacheIncomplete, CacheMismatch, CacheMissing, TargetError
from .append import check_extends, other_place, refuse_difference
from .begin import check_fits, refuse_strangers
from .claims import Claims, ShardClaims, exclusive
from .durable import commit_dir, explained, filling_dir, fsync_path, remove_stale
from .head import TargetHead, write_head
from .layout import (
    MANIFEST,
    SHARDS,
    TARGET,
    plan_file,
    shard_dir,
    shard_name,
)
from .manifest import Manifest, build_manifest, check_manifest, read_manifest, write_manifest
from .plan import Plan, read_plan, write_plan
from .record import ShardRecord, check_size, read_record, record_files, write_record
from .rows import Row
from .shard import order_rows, write_shard_files
from .stats import write_totals

POLL_SECONDS = 0.2
SHARDS_SHOWN = 5


class CacheWriter:
    """A writer of a cache, alone or beside others. Use `create_or_resume`, and as a context manager.

    Attributes:
        path, plan: the cache's folder and its plan.
        replaced_shards: what was wrong with shards of an unfinished cache that were damaged and are missing now.
        notices: what else a person should know, one line each.
    """

    def __init__(self, path: Path, plan: Plan, versions: Mapping[str, str]) -> None:
        self.path = path
        self.plan = plan
        self.versions = dict(versions)
        self.place: Path | str = path  # for messages
        self.replaced_shards: dict[int, str] = {}
        self.notices: list[str] = []
        self._claims: ShardClaims = Claims(path)
        self._until = "taken over at once when their processes end"
        self._records: dict[int, ShardRecord] = {}
        self._resumed: tuple[int, ...] = ()
        self._manifest: Manifest | None = None
        self._extended: Manifest | None = None

    @classmethod
    def create_or_resume(
        cls,
        path: Path | str,
        plan: Plan,
        head: TargetHead,
        target_files: Callable[[Path], None],
        versions: Mapping[str, str],
    ) -> Self:
        """Start a cache, go on with one that has the same plan, or join the writers who are at it.

        Args:
            path: the cache's folder; made where it does not exist.
            plan: rows and shards.
            head: the target's head, stored once.
            target_files: writes config, tokenizer and chat template into the folder it is given.
            versions: package versions for the manifest; part of no hash.

        Raises:
            DflashError: another process does not let go of the lock, the disk is full, or the folder may not be
                written.
            CacheMismatch: the folder holds a cache of another plan, or something that is no cache.
            CacheCorrupt: the cache there is complete and damaged.
            ConfigError: the codec does not exist, or the head does not fit the plan.
        """
        check_fits(plan, head)
        cache = Path(path).absolute()
        refuse_strangers(cache)
        writer = cls(cache, plan, versions)
        writer._begin(head, target_files)
        return writer

    @classmethod
    def reopen(cls, path: Path | str, plan: Plan) -> Manifest:
        """Return the manifest of a finished cache of this plan, after the checks that `create_or_resume` makes.

        Raises:
            CacheMismatch: the cache there has another plan.
            CacheMissing, CacheIncomplete, CacheCorrupt: it is not finished, or damaged.
        """
        cache = Path(path).absolute()
        manifest = read_manifest(cache)
        if manifest.generation != plan.identity.generation:
            refuse_difference(cache, plan.identity, manifest.identity)
        writer = cls(cache, plan, manifest.versions)
        with explained(cache), exclusive(cache):
            writer._start_or_match()
            writer._take_stock()
        return manifest

    @property
    def missing_shards(self) -> list[int]:
        """Shards that nobody has committed as far as this writer knows, in order."""
        return [shard for shard in range(self.plan.num_shards) if shard not in self._records]

    @property
    def resumed_rows(self) -> int:
        """Rows of the plan whose shards were there when this writer started."""
        return sum(self.plan.shard_rows[shard] for shard in self._resumed)

    def take_notices(self) -> list[str]:
        """Return the notices that nobody has taken yet."""
        taken, self.notices = self.notices, []
        return taken

    def record(self, shard: int) -> ShardRecord:
        """Return the record of a committed shard."""
        return self._records[shard]

    def claim_shards(
        self, on_found: Callable[[int], None] | None = None, on_wait: Callable[[str], None] | None = None
    ) -> Iterator[int]:
        """Yield shards to compute until every shard is committed, by this writer or another.

        A shard is this writer's alone until the next one is asked for. Where all that is left is in other hands, this
        waits: what a writer that died held is yielded again.

        Args:
            on_found: told each shard that another writer has committed, once.
            on_wait: told in words what is waited for, at the first wait alone.
        """
        tell = on_wait
        while self.missing_shards:
            idle = True
            for shard in self.missing_shards:
                if self._claim(shard, on_found):
                    idle = False
                    try:
                        yield shard
                    finally:
                        self._claims.release(shard)
            if idle and (left := self.missing_shards):
                if tell is not None:
                    tell(f"waiting for {_named(left)}, which other workers hold; {self._until}")
                    tell = None
                self._wait()

    def write_shard(self, shard: int, rows: Iterable[Row], dropped: Mapping[str, list[str]]) -> None:
        """Write one shard and commit it.

        Args:
            shard: its number.
            rows: its rows, in any order: all that the plan puts in it but the dropped ones.
            dropped: reason -> ids of the rows that are not stored.

        Raises:
            CacheMismatch: the rows are not those of the plan, or a tensor has another shape, dtype or range.
            DflashError: the disk is full, or another writer is writing this shard. Nothing of the shard is left.
        """
        if shard in self._records or not self._claim(shard):
            done = shard in self._records
            raise CacheMismatch(
                f"{self.path}: shard {shard} is {'written already' if done else 'being written by another process'}; "
                "a shard is written once"
            )
        try:
            ordered = order_rows(self.plan, shard, list(rows), dropped)
            with explained(self.path):
                self._records[shard] = self._commit(shard, ordered, dropped)
        finally:
            self._claims.release(shard)

    def _commit(self, shard: int, rows: list[Row], dropped: Mapping[str, list[str]]) -> ShardRecord:
        with filling_dir(shard_dir(self.path, shard), commit_dir) as temporary:
            record = write_shard_files(temporary, self.plan, shard, rows, dropped)
            write_record(temporary, record)
        return record

    def finish(self) -> Manifest:
        """Write the statistics and the manifest, which makes the cache complete; or read what another writer wrote.

        Raises:
            CacheIncomplete: shards are missing.
            TargetError: every row was dropped.
            DflashError: the disk is full.
        """
        if self._manifest is None:
            with explained(self.path), exclusive(self.path):
                self._take_stock()
                if self._manifest is None:
                    self._manifest = self._write_manifest()
                self._claims.remove()
        return self._manifest

    def _write_manifest(self) -> Manifest:
        missing = self.missing_shards
        if missing:
            raise CacheIncomplete(f"{self.path}: {len(missing)} of {self.plan.num_shards} shards are not written yet")
        records = tuple(self._records[shard] for shard in range(self.plan.num_shards))
        if not any(record.num_rows for record in records):
            reasons = sorted({reason for record in records for reason in record.dropped})
            raise TargetError(
                f"{self.path}: every one of the {self.plan.num_rows} rows was dropped ({', '.join(reasons)}); "
                "the target's states are unusable in this dtype"
            )
        if self._extended is None:
            files = {f"{TARGET}/{name}": record for name, record in record_files(self.path / TARGET).items()}
        else:
            files = {name: file for name, file in self._extended.files.items() if name.startswith(f"{TARGET}/")}
        parents = self._extended.parents if self._extended else ()
        files |= write_totals(self.path, self.plan, records)
        manifest = build_manifest(self.plan, records, files, self.versions, parents)
        write_manifest(self.path, manifest)
        return manifest

    def close(self) -> None:
        """Let go of all claims. A cache that is not finished stays unfinished."""
        self._claims.release_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self) -> None:
        """Wait for other writers, who have all that is left in their hands."""
        time.sleep(POLL_SECONDS)

    # --- starting -----------------------------------------------------------------------------------------------

    def _begin(self, head: TargetHead, target_files: Callable[[Path], None]) -> None:
        """Make the folder, write or match the plan, store the target, and see what is there."""
        with explained(self.path):
            if not self.path.is_dir():
                self.path.mkdir(parents=True, exist_ok=True)
                fsync_path(self.path.parent)
            with exclusive(self.path):
                remove_stale(self.path)
                self._start_or_match()
                self._store_target(head, target_files)
                self._take_stock()
        self._resumed = tuple(self._records)

    def _start_or_match(self) -> None:
        """Write the plan, or check that the one there is the same."""
        generation = self.plan.identity.generation
        finished = read_manifest(self.path) if (self.path / MANIFEST).exists() else None
        if finished is None and generation:
            raise CacheIncomplete(f"{self.path}: not finished, so it cannot be extended: finish it first")
        if finished is not None and finished.generation == generation - 1:
            base = read_plan(self.path, finished.generation)
            check_manifest(self.path, finished, base)
            check_extends(base, self.plan)
            self._extended = finished
            if not (self.path / plan_file(generation)).exists():
                self._remove_shards_from(base.num_shards)
        if finished is not None and finished.generation not in (generation, generation - 1):
            refuse_difference(self.place, self.plan.identity, finished.identity)
        if not (self.path / plan_file(generation)).exists():
            write_plan(self.path, self.plan)
            (self.path / SHARDS).mkdir(exist_ok=True)
            fsync_path(self.path)
            return
        found = read_plan(self.path, generation)
        refuse_difference(self.place, self.plan.identity, found.identity, extending=self._extended is not None)
        if found.digest != self.plan.digest:
            raise CacheMismatch(
                f"{self.path}: holds a cache whose rows differ from the ones planned now, though its inputs are the "
                f"same: another version of transformers tokenizes otherwise; {other_place(self.place)}"
            )
        self.plan = found  # the same in all that counts; its names are the ones the cache was begun with

    def _remove_shards_from(self, first: int) -> None:
        """Remove shards of an extension that was given up."""
        for directory in (self.path / SHARDS).iterdir():
            if directory.name.isdecimal() and int(directory.name) >= first:
                shutil.rmtree(directory)

    def _store_target(self, head: TargetHead, target_files: Callable[[Path], None]) -> None:
        """Store the target's head, config and tokenizer once."""
        final = self.path / TARGET
        if final.is_dir():
            return
        with filling_dir(final, commit_dir) as temporary:
            write_head(temporary, head)
            target_files(temporary)

    def _take_stock(self) -> None:
        """Find the shards that are there."""
        (self.path / SHARDS).mkdir(exist_ok=True)
        finished = read_manifest(self.path) if (self.path / MANIFEST).exists() else None
        if finished is not None:
            if finished.generation == self.plan.identity.generation:
                check_manifest(self.path, finished, self.plan)
                self._manifest = finished
            elif self._extended is not None:
                self._extended = finished  # it may have been repaired since
            for record in finished.shards:
                for name, file in record.files.items():
                    check_size(shard_dir(self.path, record.shard), name, file)
            self._records |= {record.shard: record for record in finished.shards}
        for shard in self.missing_shards:
            self._take_committed(shard)

    def _claim(self, shard: int, on_found: Callable[[int], None] | None = None) -> bool:
        """Claim a shard that is not committed, and clear its place of what is left of earlier attempts."""
        with explained(self.path):
            if not self._claims.take(shard):
                return False
            if not self._take_committed(shard):
                remove_stale(self.path / SHARDS, shard_name(shard))
                if shard_dir(self.path, shard).exists():
                    shutil.rmtree(shard_dir(self.path, shard))
                return True
        self._claims.release(shard)
        if on_found is not None:
            on_found(shard)
        return False

    def _take_committed(self, shard: int) -> bool:
        """Take the record of a committed shard; False where it is not there, or damaged: it is computed again."""
        directory = shard_dir(self.path, shard)
        if not directory.exists():
            return False
        try:
            record = read_record(directory, self.plan.identity.layer_ids)
            if record.shard != shard:
                raise CacheCorrupt(f"{directory}: its record is that of shard {record.shard}")
            for name, file in record.files.items():
                check_size(directory, name, file)
        except (CacheCorrupt, CacheMissing) as error:
            self.replaced_shards[shard] = str(error)
            return False
        self._records[shard] = record
        return True


def _named(shards: list[int]) -> str:
    more = ", ..." if len(shards) > SHARDS_SHOWN else ""
    return f"shard{'s' * (len(shards) > 1)} {', '.join(map(str, shards[:SHARDS_SHOWN]))}{more}"
