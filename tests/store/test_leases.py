"""Claims in a bucket: a real S3 server's conditional writes decide, and a lease frees what a dead holder had."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dflash_pipeline.errors import ConfigError
from dflash_pipeline.store.bucket import Bucket, Token
from dflash_pipeline.store.leases import MOST_SECONDS, ClaimLost, Leases, Ranks, _parse, claims_in

pytest.importorskip("obstore", reason="the extra `buckets` is not installed")

LONG = 600.0


@pytest.fixture
def bucket(endpoint: str, tmp_path: Path) -> Bucket:
    """An empty place on the server."""
    return Bucket(f"s3://caches/{tmp_path.name}/leases")


def die(claims: Leases) -> None:
    """Give no more sign of life, as a process that was killed."""
    claims._ended.set()


def test_of_many_who_claim_at_once_one_succeeds(bucket: Bucket) -> None:
    for shard in range(5):
        writers = [Leases(bucket, f"writer-{number}", LONG) for number in range(8)]
        with ThreadPoolExecutor(8) as pool:
            taken = list(pool.map(lambda writer, wanted=shard: writer.take(wanted), writers))
        assert sorted(taken) == [False] * 7 + [True]
        for writer in writers:
            writer.release_all()
    assert bucket.sizes(".claims") == {}


def test_a_holder_that_lives_keeps_its_claim_for_many_leases(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, other = Leases(bucket, "holder", LONG), Leases(bucket, "other", LONG)
    assert holder.take(0)
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    for _ in range(5):
        assert not other.take(0)
        clock[0] += LONG * 0.9
        assert not other.take(0)
        holder.check(0)  # as its thread does every quarter of the lease
    holder.release(0)
    assert other.take(0)
    other.release_all()


def test_a_claim_is_renewed_while_its_holder_is_at_work(bucket: Bucket) -> None:
    holder = Leases(bucket, "holder", 1.0)
    assert holder.take(0)
    seen, deadline = set(), time.monotonic() + 120
    while len(seen) < 4:
        assert time.monotonic() < deadline
        found = bucket.look(".claims/00000")
        assert found is not None
        seen.add(found[0])
        time.sleep(0.05)
    holder.check(0)
    holder.release_all()
    assert bucket.sizes(".claims") == {}


def test_a_dead_holder_s_claim_goes_to_one_other_after_its_lease_by_the_watchers_own_clock(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = Leases(bucket, "holder", 20)
    assert holder.take(3)
    die(holder)
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "time", lambda: pytest.fail("machines need not agree on the time"))
    watchers = [Leases(bucket, f"watcher-{number}", LONG) for number in range(3)]
    assert [watcher.take(3) for watcher in watchers] == [False] * 3
    clock[0] += 19.9  # the claim's lease counts, not the watchers'
    assert [watcher.take(3) for watcher in watchers] == [False] * 3
    late = Leases(bucket, "late", LONG)
    clock[0] += 0.2
    assert not late.take(3)  # it has only begun to watch
    assert [watcher.take(3) for watcher in watchers] == [True, False, False]
    monkeypatch.undo()
    with pytest.raises(ClaimLost, match="shard 3 over: for 20 s this one gave no sign of life"):
        holder.check(3)
    assert not holder.holds(3)
    holder.release_all()
    assert not Leases(bucket, "another", LONG).take(3)  # what the old holder let go of was not the new one's
    watchers[0].check(3)
    for watcher in watchers:
        watcher.release_all()


def test_a_writer_that_is_started_again_has_its_claims_at_once(bucket: Bucket) -> None:
    before = Leases(bucket, "same", LONG)
    assert before.take(1)
    die(before)
    after = Leases(bucket, "same", LONG)
    assert after.take(1)
    after.check(1)
    with pytest.raises(ClaimLost):
        before.check(1)
    after.release_all()


def test_a_put_whose_answer_was_lost_counts(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Bucket.put_if

    def deaf(self: Bucket, name: str, data: bytes, token: Token | None) -> Token | None:
        real(self, name, data, token)
        return real(self, name, data, token)  # what a client does that heard nothing: it is refused

    monkeypatch.setattr(Bucket, "put_if", deaf)
    claims = Leases(bucket, "deaf", LONG)
    assert claims.take(0)
    claims.check(0)
    claims.check(0)
    claims.release_all()
    assert bucket.sizes(".claims") == {}


def test_a_claim_that_is_gone_is_lost(bucket: Bucket) -> None:
    holder, other = Leases(bucket, "holder", LONG), Leases(bucket, "other", LONG)
    assert holder.take(0)
    bucket.delete(".claims/00000")  # another took it over, and is done
    with pytest.raises(ClaimLost):
        holder.check(0)
    assert other.take(0)
    assert holder.take(1)
    holder.remove()
    assert bucket.sizes(".claims") == {}


@pytest.mark.parametrize("kind", ["honest", "disabled", "deaf", "file"])
def test_whether_a_store_has_conditional_writes_is_tried(
    kind: str, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "disabled":
        monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    if kind == "deaf":  # a server that does not know the header passes over it

        def put(self: Bucket, name: str, data: bytes, token: Token | None) -> Token | None:
            self.upload(name, data)
            found = self.look(name)
            return found[1] if found else None

        monkeypatch.setattr(Bucket, "put_if", put)
    place = f"file://{tmp_path}/place" if kind == "file" else f"s3://caches/{tmp_path.name}/try"
    bucket = Bucket(place, create=True)
    claims = claims_in(bucket, "me", LONG, 1, 3)
    assert isinstance(claims, Leases if kind == "honest" else Ranks)
    assert bucket.sizes("") == {}
    if isinstance(claims, Ranks):
        assert [claims.take(shard) for shard in range(7)] == [False, True, False, False, True, False, False]
        assert "worker 1 of 3" in claims.notice
        assert "must be the only one" in Ranks(0, 1).notice
    else:
        assert claims.notice == ""


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"owner": "a", "lease_seconds": 5}, ("a", 5.0)),
        ({"owner": "a", "lease_seconds": 1e9}, ("a", MOST_SECONDS)),
        ({"owner": "a", "lease_seconds": -1}, ("a", MOST_SECONDS)),
        ({"owner": "a", "lease_seconds": float("nan")}, ("a", MOST_SECONDS)),
        ({"owner": "a", "lease_seconds": None}, (None, MOST_SECONDS)),
        ({"lease_seconds": 5}, (None, MOST_SECONDS)),
        ([], (None, MOST_SECONDS)),
        ("", (None, MOST_SECONDS)),
    ],
)
def test_a_claim_that_makes_no_sense_lapses_after_the_longest_lease(content: Any, expected: tuple[Any, float]) -> None:
    assert _parse(json.dumps(content).encode()) == expected
    assert _parse(b"\xff{") == (None, MOST_SECONDS)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 3601.0, float("nan")])
def test_leases_out_of_range_are_refused(seconds: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected 0.1 to 3600"):
        Leases(Bucket(f"file://{tmp_path}"), "me", seconds)
