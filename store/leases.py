"""Who of several writers works on which shard of a cache in a bucket, where no lock frees itself.

A claim is an object .claims/NNNNN. It is put on condition that there is none, so one writer gets it; its holder puts it
again every quarter of the lease, on condition that it still is the one it put. Others watch: a claim that stays the
same for a whole lease has no holder any more, and is taken over on condition that it is still that one.

Each watcher measures the lease by its own monotonic clock, from when it first saw the claim. So the machines' clocks
need not agree on the time; they are assumed to run at the same rate, within a few per cent. A holder that stood still
for longer than a lease finds, before it puts a shard's files and again before its record, that it lost the claim. If it
stands still between that and the put itself, its object may come late, over one of the next holder's. Equal machines
write equal bytes; elsewhere the digests in the record and the manifest tell every reader and `verify`.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from contextlib import suppress

from ..errors import ConfigError, DflashError
from .bucket import Bucket, Token
from .layout import CLAIMS, shard_name

LEASE_SECONDS = 60.0
MOST_SECONDS = 3600.0
FINISH = -1  # claimed like a shard by whoever writes the manifest


class ClaimLost(DflashError):
    """Another writer has taken a shard over."""


def check_lease(lease_seconds: float) -> None:
    """Check the length of a lease.

    Raises:
        ConfigError: it is not within 0.1 to 3,600 seconds.
    """
    if not 0.1 <= lease_seconds <= MOST_SECONDS:
        raise ConfigError(f"lease_seconds {lease_seconds:g}: expected 0.1 to {MOST_SECONDS:g}")


def claims_in(bucket: Bucket, owner: str, lease_seconds: float, rank: int, world_size: int) -> Leases | Ranks:
    """Return claims by leases, or where the bucket's store has no conditional writes, the division by rank."""
    if has_conditional_writes(bucket, owner):
        return Leases(bucket, owner, lease_seconds)
    return Ranks(rank, world_size)


def has_conditional_writes(bucket: Bucket, owner: str) -> bool:
    """Try whether a store refuses what it should: some have no conditional writes, and some pass over the condition.

    Raises:
        DflashError: the bucket cannot be written.
    """
    name = f"{CLAIMS}/try-{owner}"
    bucket.delete(name)
    try:
        first = bucket.put_if(name, b"1", None)
        if first is None or bucket.put_if(name, b"2", None) is not None:
            return False
        return bucket.put_if(name, b"3", first) is not None and bucket.put_if(name, b"4", first) is None
    except NotImplementedError:
        return False
    finally:
        bucket.delete(name)


class Leases:
    """The shards that this writer holds in a bucket against others.

    Args:
        bucket: the cache's.
        owner: names this writer; claims under this name are a former life's, and taken over at once. No two writers
            that live at the same time may have one name.
        lease_seconds: how long a claim outlives its holder.

    Raises:
        ConfigError: the lease is not within 0.1 to 3,600 seconds.
    """

    def __init__(self, bucket: Bucket, owner: str, lease_seconds: float = LEASE_SECONDS) -> None:
        check_lease(lease_seconds)
        self.notice = ""
        self.poll_seconds = min(lease_seconds / 10, 5.0)
        self._bucket = bucket
        self._owner = owner
        self._lease_seconds = lease_seconds
        self._held: dict[int, Token] = {}
        self._watched: dict[int, tuple[Token, float]] = {}
        self._lock = threading.Lock()  # of both, and while a claim is put: never two puts of one claim at once
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def holds(self, shard: int) -> bool:
        """Tell whether a shard is this writer's, as far as it knows."""
        return shard in self._held

    def take(self, shard: int) -> bool:
        """Claim a shard at once; tell whether it is this writer's now. False where another writer has it.

        Raises:
            DflashError: the bucket cannot be read or written.
        """
        with self._lock:
            if shard in self._held:
                return True
            token, other = self._put(shard, None)
            if token is None and other is not None and self._has_no_holder(shard, *other):
                token, _ = self._put(shard, other[1])
            if token is None:
                return False
            self._held[shard] = token
            self._watched.pop(shard, None)
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name="leases", daemon=True)
            self._thread.start()
        return True

    def check(self, shard: int) -> None:
        """Make sure that a shard is still this writer's, by putting its claim again.

        Raises:
            ClaimLost: another writer has taken it over.
            DflashError: the bucket cannot be read or written.
        """
        with self._lock:
            if not self._renew(shard):
                raise ClaimLost(
                    f"{self._bucket.url}: another writer has taken shard {shard} over: for {self._lease_seconds:g} s "
                    "this one gave no sign of life"
                )

    def release(self, shard: int) -> None:
        """Let go of a shard; nothing where it is not held. A claim that cannot be removed now lapses by itself."""
        with self._lock:
            with suppress(DflashError):
                if self._renew(shard):  # what another has taken over is not removed
                    self._bucket.delete(_claim_name(shard))
            self._held.pop(shard, None)

    def release_all(self) -> None:
        """Let go of every shard."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._ended.clear()
        for shard in list(self._held):
            self.release(shard)

    def remove(self) -> None:
        """Remove every claim. Call it when the cache is finished: nobody needs one any more."""
        self.release_all()
        for name in self._bucket.sizes(CLAIMS):
            self._bucket.delete(name)

    def _put(self, shard: int, token: Token | None) -> tuple[Token | None, tuple[bytes, Token] | None]:
        """Put a claim where there is none, or the one of that token; return its token, or else what is there."""
        turn = {"owner": self._owner, "lease_seconds": self._lease_seconds, "turn": secrets.token_hex(8)}
        name, data = _claim_name(shard), json.dumps(turn).encode()
        put = self._bucket.put_if(name, data, token)
        if put is not None:
            return put, None
        there = self._bucket.look(name)
        if there is not None and there[0] == data:  # put, but the answer was lost, and the second try was refused
            return there[1], None
        return None, there

    def _has_no_holder(self, shard: int, content: bytes, token: Token) -> bool:
        owner, lease_seconds = _parse(content)
        if owner == self._owner:
            return True
        if shard not in self._watched or self._watched[shard][0] != token:
            self._watched[shard] = (token, time.monotonic())
        return time.monotonic() - self._watched[shard][1] >= lease_seconds

    def _renew(self, shard: int) -> bool:
        if shard not in self._held:
            return False
        token, _ = self._put(shard, self._held[shard])
        if token is None:  # another's now; or none is there: another had it, and is done
            del self._held[shard]
            return False
        self._held[shard] = token
        return True

    def _keep(self) -> None:
        """Renew what is held until the end; a bucket out of reach is tried again at the next turn."""
        while not self._ended.wait(self._lease_seconds / 4):
            for shard in list(self._held):
                with self._lock, suppress(DflashError):
                    self._renew(shard)


class Ranks:
    """The division of the shards among the ranks of one launch, where the store cannot say who was first."""

    poll_seconds = 2.0

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self.notice = "the store has no conditional writes, so workers cannot claim shards: " + (
            f"this is worker {rank} of {world_size}, and each computes every {world_size}th shard"
            if world_size > 1
            else "this must be the only one; several are to be started by torchrun or --num-workers"
        )

    def holds(self, shard: int) -> bool:
        """Tell whether a shard is this writer's; the first one finishes the cache."""
        return self._rank == (0 if shard == FINISH else shard % self._world_size)

    take = holds

    def check(self, shard: int) -> None:
        """Do nothing: it stays so."""

    def release(self, shard: int) -> None:
        """Do nothing."""

    def release_all(self) -> None:
        """Do nothing."""

    def remove(self) -> None:
        """Do nothing."""


def _claim_name(shard: int) -> str:
    return f"{CLAIMS}/{'finish' if shard == FINISH else shard_name(shard)}"


def _parse(content: bytes) -> tuple[str | None, float]:
    """Return owner and lease of a claim; of one that makes no sense, nobody and the longest."""
    try:
        fields = json.loads(content)
        owner, lease_seconds = str(fields["owner"]), float(fields["lease_seconds"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None, MOST_SECONDS
    return owner, lease_seconds if 0 <= lease_seconds <= MOST_SECONDS else MOST_SECONDS
