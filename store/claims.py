"""Who of several writers works on which shard, and who may begin or finish the cache.

A claim is a lock on CACHE/.claims/NNNNN; beginning and finishing hold CACHE/.lock. The locks are the system's own
(flock): it frees them when their holder dies, however it dies, so nothing a dead process held has to be broken. On a
shared file system they hold between machines where it carries flock over, as NFS 4 does.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from ..errors import DflashError
from .layout import CLAIMS, LOCK, shard_name

WAIT_SECONDS = 600.0  # the longest anyone holds the cache's lock is while the target's head is written


@contextmanager
def exclusive(cache: Path, wait_seconds: float = WAIT_SECONDS) -> Iterator[None]:
    """Hold the cache's lock, after waiting for it; with 0 seconds, at once or not at all.

    Raises:
        DflashError: another process did not let go of it in that time.
    """
    lock = FileLock(str(cache / LOCK))
    try:
        lock.acquire(timeout=wait_seconds)
    except Timeout:
        doing = f"is writing this cache right now (it holds {cache / LOCK}): wait for it"
        if wait_seconds:
            doing = (
                f"has held {cache / LOCK} for {wait_seconds:g} s, which beginning or finishing a cache does not take: "
                "see whether it hangs"
            )
        raise DflashError(f"{cache}: another process {doing}, then run the same command again") from None
    try:
        yield
    finally:
        lock.release()


class ShardClaims(Protocol):
    """What a writer asks of claims: these here, or those in a bucket (leases.py)."""

    def take(self, shard: int) -> bool:
        """Claim a shard at once; tell whether it is this writer's now."""

    def release(self, shard: int) -> None:
        """Let go of a shard."""

    def release_all(self) -> None:
        """Let go of every shard."""

    def remove(self) -> None:
        """Remove what claims leave behind."""


class Claims:
    """The shards that this writer holds against others."""

    def __init__(self, cache: Path) -> None:
        self._directory = cache / CLAIMS
        self._held: dict[int, FileLock] = {}

    def take(self, shard: int) -> bool:
        """Claim a shard at once; tell whether it is this writer's now. False where another writer has it."""
        if shard in self._held:
            return True
        self._directory.mkdir(exist_ok=True)
        lock = FileLock(str(self._directory / shard_name(shard)))
        try:
            lock.acquire(timeout=0)
        except (Timeout, FileNotFoundError):  # the folder goes when the cache is finished
            return False
        self._held[shard] = lock
        return True

    def release(self, shard: int) -> None:
        """Let go of a shard; nothing where it is not held."""
        lock = self._held.pop(shard, None)
        if lock is not None:
            lock.release()

    def release_all(self) -> None:
        """Let go of every shard."""
        for shard in list(self._held):
            self.release(shard)

    def remove(self) -> None:
        """Remove the lock files. Call it when every shard is committed: nobody needs a claim any more."""
        self.release_all()
        shutil.rmtree(self._directory, ignore_errors=True)
