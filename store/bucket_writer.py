"""Writes a cache straight into a bucket, alone or beside writers on other machines that share nothing but the bucket.

Each writer builds its shards in a cache folder of its own on the local disk and puts them as they are finished: the
files first, the record last, and then the local files go. The plan is put before the first shard, on condition that
there is none; whoever has claimed the finish sums up the statistics and puts target/ and the manifest, which is last.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from ..errors import CacheCorrupt, CacheMismatch, CacheMissing, DflashError, TargetError
from .begin import check_fits
from .bucket import Bucket
from .durable import explained, remove_stale, write_atomic
from .head import TargetHead
from .layout import MANIFEST, MAX_JSON_BYTES, PLAN, RECORD, SHARDS, STATS, shard_dir, shard_file
from .leases import FINISH, LEASE_SECONDS, ClaimLost, Leases, Ranks, claims_in
from .manifest import Manifest, check_manifest, read_manifest
from .plan import Plan
from .publish import content, put_plan, put_shard
from .record import ShardRecord, check_file, parse_commit, read_record
from .rows import Row
from .shard import order_rows
from .work_folder import WorkFolder
from .writer import CacheWriter

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 1800.0  # where shards are divided by rank: without a new one for so long, a rank is taken for dead


class BucketWriter(CacheWriter):
    """A writer of a cache in a bucket. Use `join`, and as a context manager.

    Attributes: those of `CacheWriter`; `path` is the local folder in which shards are built.
    """

    def __init__(
        self,
        bucket: Bucket,
        folder: WorkFolder,
        claims: Leases | Ranks,
        plan: Plan,
        versions: Mapping[str, str],
        lease_seconds: float,
    ) -> None:
        super().__init__(folder.path / "cache", plan, versions)
        self.place = bucket.url
        self._bucket = bucket
        self._folder = folder
        self._claims: Leases | Ranks = claims
        self._last_change = (0, time.monotonic())
        self._until = (
            f"taken over after {lease_seconds:g} s without a sign of life"
            if isinstance(claims, Leases)
            else f"given up after {PATIENCE_SECONDS:g} s without a new one"
        )
        if claims.notice:
            self.notices.append(f"{bucket.url}: {claims.notice}")

    @classmethod
    def join(
        cls,
        url: str,
        work: Path,
        plan: Plan,
        head: TargetHead,
        target_files: Callable[[Path], None],
        versions: Mapping[str, str],
        *,
        lease_seconds: float = LEASE_SECONDS,
        rank: int = 0,
        world_size: int = 1,
    ) -> Self:
        """Start a cache in a bucket, go on with one that has the same plan, or join the writers who are at it.

        Args:
            url: where the cache is to be.
            work: a local folder for the shards that are being built; may be that of other writers and caches too.
            plan, head, target_files, versions: as `CacheWriter.create_or_resume` takes them.
            lease_seconds: how long the shard of a writer that died is left alone.
            rank, world_size: which of how many workers this is, for a store without conditional writes.

        Raises:
            CacheMismatch: there is a cache of another plan, or something that is no cache.
            CacheCorrupt: the cache there is complete and damaged.
            ConfigError: the URL, the codec or the lease is not valid, or the head does not fit the plan.
            DflashError: the bucket or the local folder cannot be written.
        """
        check_fits(plan, head)
        bucket = Bucket(url, create=True)
        folder = WorkFolder(work, url)
        try:
            put_plan(bucket, plan)
            claims = claims_in(bucket, folder.owner, lease_seconds, rank, world_size)
            writer = cls(bucket, folder, claims, plan, versions, lease_seconds)
            with writer._named():
                writer._fetch_begun()
                writer._begin(head, target_files)
        except BaseException:
            folder.close(remove=False)
            raise
        return writer

    def write_shard(self, shard: int, rows: Iterable[Row], dropped: Mapping[str, list[str]]) -> None:
        """Write one shard and put it into the bucket.

        Where another writer took it over meanwhile, because this one gave no sign of life, it is left to that one, and
        `notices` says so.

        Raises:
            CacheMismatch: the rows are not those of the plan.
            DflashError: the disk is full, or the bucket cannot be written.
        """
        try:
            ordered = order_rows(self.plan, shard, list(rows), dropped)
            with explained(self.path, "--work"):
                self._records[shard] = self._commit(shard, ordered, dropped)
        except ClaimLost as lost:
            shutil.rmtree(shard_dir(self.path, shard), ignore_errors=True)
            self.notices.append(f"{lost}; that writer's shard counts")
        finally:
            self._claims.release(shard)

    def finish(self) -> Manifest:
        """Put the statistics, the target's files and the manifest, or read what another writer put.

        Raises:
            CacheIncomplete: shards are missing.
            CacheCorrupt: the manifest that another writer put is damaged.
            TargetError: every row was dropped.
            DflashError: the disk is full, or the bucket cannot be reached.
        """
        said = False
        with explained(self.path, "--work"), self._named():
            while self._manifest is None:
                mine = self._claims.take(FINISH)
                if self._fetch(MANIFEST):
                    self._manifest = read_manifest(self.path)
                    check_manifest(self.path, self._manifest, self.plan)
                elif mine:
                    self._put_finish()
                else:
                    if not said:
                        log.warning("%s: another worker writes the end of the cache; %s", self.place, self._until)
                        said = True
                    self._wait()
                self._claims.release(FINISH)
        return self._manifest

    def close(self) -> None:
        """Let go of all claims, and of the local folder. What is not in the bucket yet stays there."""
        super().close()
        self._folder.close(remove=self._manifest is not None)

    # --- the shards in the bucket -------------------------------------------------------------------------------

    def _commit(self, shard: int, rows: list[Row], dropped: Mapping[str, list[str]]) -> ShardRecord:
        record = super()._commit(shard, rows, dropped)
        self._put(record)
        return record

    def _put(self, record: ShardRecord) -> None:
        """Put a shard that is whole on the local disk, and remove it there."""
        directory = shard_dir(self.path, record.shard)
        self._claims.check(record.shard)
        put_shard(self._bucket, directory, record, lambda: self._claims.check(record.shard))
        shutil.rmtree(directory)

    def _claim(self, shard: int, on_found: Callable[[int], None] | None = None) -> bool:
        """Claim a shard that is not in the bucket; one that is whole on the local disk is put at once."""
        mine = self._claims.take(shard)
        with explained(self.path, "--work"):
            if not self._take_committed(shard) and not (mine and self._put_left(shard)):
                return mine and self._claims.holds(shard)
        shutil.rmtree(shard_dir(self.path, shard), ignore_errors=True)
        self._claims.release(shard)
        if on_found is not None:
            on_found(shard)
        return False

    def _put_left(self, shard: int) -> bool:
        """Put a shard that this folder's writer finished in an earlier life; False where there is none."""
        directory = shard_dir(self.path, shard)
        with suppress(CacheCorrupt, CacheMissing, ClaimLost):
            record = read_record(directory, self.plan.identity.layer_ids)
            for name, file in record.files.items():
                check_file(directory, name, file)
            self._put(record)
            self._records[shard] = record
        shutil.rmtree(directory, ignore_errors=True)
        return shard in self._records

    def _take_committed(self, shard: int) -> bool:
        """Take the record of a shard that is in the bucket; False where it is not, or damaged: it is computed again."""
        return self._take_there(shard, self._bucket.sizes(shard_file(shard, "")))

    def _take_there(self, shard: int, sizes: Mapping[str, int]) -> bool:
        name = shard_file(shard, RECORD)
        data = content(self._bucket, name) if name in sizes else None
        if data is None:
            return False
        try:
            record = parse_commit(data, f"{self._bucket.url}/{name}", self.plan.identity.layer_ids)
            if record.shard != shard:
                raise CacheCorrupt(f"{self._bucket.url}/{name}: is the record of shard {record.shard}")
            self._check_sizes(record, sizes)
        except CacheCorrupt as error:
            self.replaced_shards[shard] = str(error)
            return False
        self._records[shard] = record
        return True

    def _check_sizes(self, record: ShardRecord, sizes: Mapping[str, int]) -> None:
        for name, file in record.files.items():
            path = shard_file(record.shard, name)
            if sizes.get(path) != file.num_bytes:
                raise CacheCorrupt(
                    f"{self._bucket.url}/{path}: expected {file.num_bytes} bytes, found {sizes.get(path, 'no object')}"
                )

    def _take_stock(self) -> None:
        """Find the shards that are in the bucket: one listing, and their records."""
        (self.path / SHARDS).mkdir(exist_ok=True)
        remove_stale(self.path / SHARDS)
        sizes: dict[str, dict[str, int]] = defaultdict(dict)
        for name, num_bytes in self._bucket.sizes(SHARDS).items():
            sizes[name.split("/")[1]][name] = num_bytes
        if (self.path / MANIFEST).exists():
            finished = read_manifest(self.path)
            check_manifest(self.path, finished, self.plan)
            try:
                for record in finished.shards:
                    self._check_sizes(record, sizes[shard_dir(self.path, record.shard).name])
            except CacheCorrupt as error:
                raise CacheCorrupt(
                    f"{error}; `dflash cache repair {self._bucket.url} --corpus F --target M` makes it again, and no "
                    "shard that is sound"
                ) from error
            self._records |= {record.shard: record for record in finished.shards}
            self._manifest = finished
            return
        there = [shard for shard in self.missing_shards if shard_dir(self.path, shard).name in sizes]
        with self._bucket.pool() as pool:
            list(pool.map(lambda shard: self._take_there(shard, sizes[shard_dir(self.path, shard).name]), there))

    def _wait(self) -> None:
        """Wait for the others.

        Raises:
            DflashError: shards are divided by rank, and no other rank has finished one for a long time.
        """
        now, done = time.monotonic(), len(self._records)
        if done != self._last_change[0]:
            self._last_change = (done, now)
        if isinstance(self._claims, Ranks) and now - self._last_change[1] > PATIENCE_SECONDS:
            raise DflashError(
                f"{self._bucket.url}: no other worker has put a shard for {PATIENCE_SECONDS:g} s, and "
                f"{len(self.missing_shards)} of theirs are missing: run the same command again, alone or with all ranks"
            )
        time.sleep(self._claims.poll_seconds)

    # --- beginning and finishing --------------------------------------------------------------------------------

    def _fetch(self, name: str) -> bool:
        """Fetch a JSON file of the cache's root into the local folder; False where there is none."""
        data = content(self._bucket, name)
        if data is None:
            (self.path / name).unlink(missing_ok=True)
            return False
        write_atomic(self.path / name, data)
        return True

    def _fetch_begun(self) -> None:
        """Fetch the plan, and the manifest where there is one. What the local folder holds of another plan goes."""
        data = self._bucket.read(PLAN, MAX_JSON_BYTES)
        plan = self.path / PLAN
        with explained(self.path, "--work"):
            if not plan.is_file() or plan.read_bytes() != data:
                shutil.rmtree(self.path, ignore_errors=True)
                self.path.mkdir(parents=True)
                write_atomic(plan, data)
            self._fetch(MANIFEST)

    def _put_finish(self) -> None:
        """Write the end of the cache from what the bucket holds now, and put it, the manifest last."""
        self._records = {}
        self._take_stock()
        with self._bucket.pool() as pool:
            list(pool.map(self._fetch_stats, self._records.values()))
        manifest = self._write_manifest()
        try:
            self._claims.check(FINISH)
            for name, file in manifest.files.items():
                if name != PLAN:
                    self._bucket.upload(name, check_file(self.path, name, file))
            self._claims.check(FINISH)
        except ClaimLost:
            return  # whoever took it over finishes
        self._bucket.upload(MANIFEST, (self.path / MANIFEST).read_bytes())
        self._manifest = manifest
        self._claims.remove()

    def _fetch_stats(self, record: ShardRecord) -> None:
        """Fetch the statistics of a shard, which the totals are made of."""
        file = record.files.get(STATS)
        if file is not None:
            directory = shard_dir(self.path, record.shard)
            self._bucket.download(shard_file(record.shard, STATS), directory / STATS, file.num_bytes)
            check_file(directory, STATS, file)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Let errors about the cache name the bucket and not the local folder."""
        try:
            yield
        except (CacheCorrupt, CacheMismatch, CacheMissing, TargetError) as error:
            raise type(error)(str(error).replace(str(self.path), self._bucket.url)) from error
