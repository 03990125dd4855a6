"""Where a reader's files come from: a folder, or a bucket through a bounded mirror of it on the local disk."""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..errors import CacheIncomplete, CacheMissing, DflashError
from .bucket import Bucket, is_url
from .durable import explained_temporary, temporary_name
from .layout import MANIFEST, MAX_JSON_BYTES, PLAN, RECORD, SHARDS, safe_join, shard_dir

MIRROR_BYTES = 16 * 2**30
"""The bound of a mirror where the disk has twice as much free."""


def open_source(place: Path | str) -> Folder | Mirror:
    """Return the source of a cache's files.

    Raises:
        ConfigError: a URL of another scheme, or the extra `buckets` is not installed.
    """
    return Mirror(Bucket(str(place))) if is_url(place) else Folder(Path(place))


class Folder:
    """A cache on the local disk: its files are where they are."""

    def __init__(self, path: Path) -> None:
        self.root = path.absolute()
        self.place: Path | str = self.root

    def fetch(self, _files: Mapping[str, int]) -> None:
        """Do nothing."""

    def fetch_json(self, _name: str) -> None:
        """Do nothing."""

    def give_up(self) -> None:
        """Do nothing."""

    @contextmanager
    def holding(self, _shard: int | None) -> Iterator[None]:
        """Do nothing."""
        yield


class Mirror:
    """Local copies of a bucket's files in a folder of its own, which goes when the mirror does.

    Files of a shard are fetched together, several at once, when the shard is read; the trainer's threads read shards
    ahead, so the next ones are under way while this one is used. When the copies take more than `max_bytes`, shards
    that are not being read are removed, those read longest ago first. What is fetched is checked by the reader like
    any file: by size, digest and checksums.
    """

    def __init__(self, bucket: Bucket, max_bytes: int | None = None) -> None:
        self.place: Path | str = bucket.url
        self.bucket = bucket
        self.root = Path(tempfile.mkdtemp(prefix="dflash-mirror-"))
        free = shutil.disk_usage(self.root).free
        self.max_bytes = min(MIRROR_BYTES, free // 2) if max_bytes is None else max_bytes
        self._held: Counter[int] = Counter()
        self._here: OrderedDict[int, dict[str, int]] = OrderedDict()  # sizes of each shard's files, by last use
        self._lock = threading.Lock()
        self._remove = weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)

    @property
    def num_bytes(self) -> int:
        """Bytes of the shards' files that are here now."""
        with self._lock:
            return self._used()

    def _used(self) -> int:
        return sum(sum(files.values()) for files in self._here.values())

    def fetch_json(self, name: str) -> None:
        """Fetch manifest or record anew.

        Raises:
            CacheMissing: it is not there. CacheIncomplete: there is a plan only.
            BucketError: the bucket cannot be read. DflashError: the local disk is full.
        """
        try:
            data = self.bucket.read(name, MAX_JSON_BYTES)
        except CacheMissing as error:
            if name == MANIFEST and self.bucket.size(PLAN) is not None:
                done = sum(path.endswith(f"/{RECORD}") for path in self.bucket.sizes(SHARDS))
                raise CacheIncomplete(
                    f"{self.place}: not whole: {done} shards are there and no {MANIFEST}; the same `dflash extract` or "
                    "`dflash cache publish` goes on from them"
                ) from error
            if name == MANIFEST:
                raise CacheMissing(f"{self.place}: there is no cache") from error
            raise
        path = safe_join(self.root, name)
        with explained_temporary(self._kept()):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(temporary_name(path.name))  # another thread may be reading it
            temporary.write_bytes(data)
            temporary.replace(path)

    def fetch(self, files: Mapping[str, int]) -> None:
        """Fetch the files that are not here yet, several at once.

        Raises:
            CacheMissing: one is not there.
            CacheCorrupt: one has another size.
            BucketError: the bucket cannot be read. DflashError: the local disk is full.
        """
        paths = {name: safe_join(self.root, name) for name in files}
        lacking = [name for name, path in paths.items() if not path.is_file()]
        if not lacking:
            return
        self._make_room({name: files[name] for name in lacking})
        with explained_temporary(self._kept()), self.bucket.pool() as pool:
            list(pool.map(lambda name: self.bucket.download(name, paths[name], files[name]), lacking))

    @contextmanager
    def holding(self, shard: int | None) -> Iterator[None]:
        """Keep a shard's files here in the block, and let its errors name the bucket's objects, not their copies."""
        if shard is not None:
            with self._lock:
                self._held[shard] += 1
                self._here[shard] = self._here.pop(shard, {})
        try:
            yield
        except DflashError as error:
            raise type(error)(str(error).replace(str(self.root), str(self.place))) from error
        finally:
            if shard is not None:
                with self._lock:
                    self._held[shard] -= 1

    def give_up(self) -> None:
        """Fetch nothing more for whoever still waits."""
        self.bucket.give_up()

    def _kept(self) -> str:
        return f"up to {self.max_bytes / 1e9:.2f} GB of {self.place}"

    def _make_room(self, coming: Mapping[str, int]) -> None:
        """Take the shards' files that are coming into account, and remove others for them."""
        with self._lock:
            for name, num_bytes in coming.items():
                shard = _shard_of(name)
                if shard is not None:
                    self._here.setdefault(shard, {})[name] = num_bytes
            for shard in list(self._here):
                if self._used() <= self.max_bytes:
                    return
                if not self._held[shard]:
                    del self._here[shard]
                    shutil.rmtree(shard_dir(self.root, shard), ignore_errors=True)


def _shard_of(name: str) -> int | None:
    parts = name.split("/")
    return int(parts[1]) if parts[0] == SHARDS else None
