"""Writes a cache: plan first, then shard after shard, the manifest last. Whatever interrupts it, it goes on.

A shard is written beside its place, flushed, and renamed: it is there whole or not at all. One writer at a time
holds CACHE/.lock, which the system releases when the process dies.

T tokens, N tokens of a shard, H hidden, K top tokens.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from ..errors import CacheCorrupt, CacheIncomplete, CacheMismatch, CacheMissing, ConfigError, DflashError, TargetError
from .codecs import check_codec
from .durable import commit_dir, explained, fsync_path, make_temporary_dir, remove_stale, write_atomic
from .head import TargetHead, write_head
from .layout import LOCK, MANIFEST, PLAN, SHARDS, STATS, TARGET, TEMP_PREFIX, shard_dir, shard_name
from .manifest import Manifest, build_manifest, check_manifest, read_manifest, write_manifest
from .plan import Plan, read_plan, write_plan
from .record import ShardRecord, check_size, digest_file, read_record, record_files, write_record
from .rows import Row
from .shard import order_rows, write_shard_files
from .stats import add_sums, read_sums, sums_bytes


class CacheWriter:
    """The one writer of a cache. Use `create_or_resume`, and as a context manager.

    Attributes:
        path, plan: the cache's folder and its plan.
        replaced_shards: what was wrong with shards of an unfinished cache that were damaged and are missing now.
    """

    def __init__(self, path: Path, plan: Plan, lock: FileLock, versions: Mapping[str, str]) -> None:
        self.path = path
        self.plan = plan
        self.versions = dict(versions)
        self.replaced_shards: dict[int, str] = {}
        self._lock = lock
        self._records: dict[int, ShardRecord] = {}
        self._resumed: tuple[int, ...] = ()
        self._manifest: Manifest | None = None

    @classmethod
    def create_or_resume(
        cls,
        path: Path | str,
        plan: Plan,
        head: TargetHead,
        target_files: Callable[[Path], None],
        versions: Mapping[str, str],
    ) -> Self:
        """Start a cache, or go on with one that has the same plan.

        Args:
            path: the cache's folder; made where it does not exist.
            plan: rows and shards.
            head: the target's head, stored once.
            target_files: writes config, tokenizer and chat template into the folder it is given.
            versions: package versions for the manifest; part of no hash.

        Raises:
            DflashError: another writer holds the lock, the disk is full, or the folder may not be written.
            CacheMismatch: the folder holds a cache of another plan, or something that is no cache.
            CacheCorrupt: the cache there is complete and damaged.
            ConfigError: the codec does not exist, or the head does not fit the plan.
        """
        check_codec(plan.identity.codec)
        if tuple(head.head_weight.shape) != (plan.vocab_size, plan.hidden_size):
            raise ConfigError(
                f"target head {list(head.head_weight.shape)} does not fit the plan: "
                f"expected [{plan.vocab_size}, {plan.hidden_size}]"
            )
        cache = Path(path).absolute()
        _refuse_strangers(cache)
        with explained(cache):
            cache.mkdir(parents=True, exist_ok=True)
            writer = cls(cache, plan, _acquire(cache), versions)
            try:
                remove_stale(cache, cache / SHARDS)
                writer._start_or_match()
                writer._store_target(head, target_files)
                writer._find_committed()
            except BaseException:
                writer.close()
                raise
        return writer

    @property
    def missing_shards(self) -> list[int]:
        """Shards still to be written, in order."""
        return [shard for shard in range(self.plan.num_shards) if shard not in self._records]

    @property
    def resumed_rows(self) -> int:
        """Rows of the plan whose shards were there when this writer started."""
        return sum(self.plan.shard_rows[shard] for shard in self._resumed)

    def write_shard(self, shard: int, rows: Iterable[Row], dropped: Mapping[str, list[str]]) -> None:
        """Write one shard and commit it.

        Args:
            shard: its number.
            rows: its rows, in any order: all that the plan puts in it but the dropped ones.
            dropped: reason -> ids of the rows that are not stored.

        Raises:
            CacheMismatch: the rows are not those of the plan, or a tensor has another shape, dtype or range.
            DflashError: the disk is full. Nothing of the shard is left.
        """
        if shard in self._records:
            raise CacheMismatch(f"{self.path}: shard {shard} is written already; a shard is written once")
        ordered = order_rows(self.plan, shard, list(rows), dropped)
        with explained(self.path):
            temporary = make_temporary_dir(self.path / SHARDS, shard_name(shard))
            try:
                record = write_shard_files(temporary, self.plan, shard, ordered, dropped)
                write_record(temporary, record)
                commit_dir(temporary, shard_dir(self.path, shard))
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        self._records[shard] = record

    def finish(self) -> Manifest:
        """Write the statistics and the manifest, which makes the cache complete.

        Raises:
            CacheIncomplete: shards are missing.
            TargetError: every row was dropped.
            DflashError: the disk is full.
        """
        if self._manifest is not None:
            return self._manifest
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
        layer_ids, hidden = self.plan.identity.layer_ids, self.plan.hidden_size
        stored = [record.shard for record in records if record.num_rows]
        sums = add_sums([read_sums(shard_dir(self.path, shard), layer_ids, hidden) for shard in stored])
        with explained(self.path):
            write_atomic(self.path / STATS, sums_bytes(sums))
            files = {f"{TARGET}/{name}": record for name, record in record_files(self.path / TARGET).items()}
            files |= {name: digest_file(self.path / name) for name in (PLAN, STATS)}
            manifest = build_manifest(self.plan, records, files, self.versions)
            write_manifest(self.path, manifest)
        self._manifest = manifest
        return manifest

    def close(self) -> None:
        """Release the lock. A cache that is not finished stays unfinished."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- starting -----------------------------------------------------------------------------------------------

    def _start_or_match(self) -> None:
        """Write the plan, or check that the one there is the same."""
        if not (self.path / PLAN).exists():
            write_plan(self.path, self.plan)
            (self.path / SHARDS).mkdir(exist_ok=True)
            fsync_path(self.path)
            return
        found = read_plan(self.path)
        differences = self.plan.identity.differences(found.identity)
        if differences:
            name, ours, theirs = differences[0]
            more = "" if len(differences) == 1 else f" (and {', '.join(entry[0] for entry in differences[1:])})"
            raise CacheMismatch(
                f"{self.path}: holds a cache of other inputs: {name} is {_short(theirs)} there, {_short(ours)} "
                f"now{more}; use another --out, or delete that folder"
            )
        if found.digest != self.plan.digest:
            raise CacheMismatch(
                f"{self.path}: holds a cache whose rows differ from the ones planned now, though its inputs are the "
                "same: another version of transformers tokenizes otherwise; use another --out, or delete that folder"
            )
        self.plan = found  # the same in all that counts; its names are the ones the cache was begun with

    def _store_target(self, head: TargetHead, target_files: Callable[[Path], None]) -> None:
        """Store the target's head, config and tokenizer once."""
        final = self.path / TARGET
        if final.is_dir():
            return
        temporary = make_temporary_dir(self.path, TARGET)
        try:
            write_head(temporary, head)
            target_files(temporary)
            commit_dir(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _find_committed(self) -> None:
        """Take stock of the shards that are there."""
        (self.path / SHARDS).mkdir(exist_ok=True)
        if (self.path / MANIFEST).exists():
            manifest = read_manifest(self.path)
            check_manifest(self.path, manifest, self.plan)
            for record in manifest.shards:
                for name, file in record.files.items():
                    check_size(shard_dir(self.path, record.shard), name, file)
            self._records = {record.shard: record for record in manifest.shards}
            self._manifest = manifest
        else:
            for shard in range(self.plan.num_shards):
                self._take_committed(shard)
        self._resumed = tuple(self._records)

    def _take_committed(self, shard: int) -> None:
        """Take a committed shard of an unfinished cache, or remove it where it is damaged: it is computed again."""
        directory = shard_dir(self.path, shard)
        if not directory.exists():
            return
        try:
            record = read_record(directory, self.plan.identity.layer_ids)
            if record.shard != shard:
                raise CacheCorrupt(f"{directory}: its record is that of shard {record.shard}")
            for name, file in record.files.items():
                check_size(directory, name, file)
        except (CacheCorrupt, CacheMissing) as error:
            self.replaced_shards[shard] = str(error)
            shutil.rmtree(directory)
            return
        self._records[shard] = record


def _acquire(cache: Path) -> FileLock:
    """Take the cache's lock at once or refuse. The system frees it when its holder dies, however it dies."""
    lock = FileLock(str(cache / LOCK))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise DflashError(
            f"{cache}: another extraction is writing this cache right now (it holds {cache / LOCK}); "
            "wait for it, or use another --out"
        ) from None
    return lock


def _refuse_strangers(cache: Path) -> None:
    """Refuse a folder that holds other things than a cache, before a single file is written into it."""
    if not cache.exists() or (cache / PLAN).exists():
        return
    if not cache.is_dir():
        raise CacheMismatch(f"{cache}: is a file; the cache needs a folder of its own, use another --out")
    ours = {LOCK, SHARDS, TARGET}
    strangers = sorted(
        path.name for path in cache.iterdir() if path.name not in ours and not path.name.startswith(TEMP_PREFIX)
    )
    if strangers:
        raise CacheMismatch(f"{cache}: holds {strangers[0]!r} and no cache; use an empty or new folder as --out")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
