"""A cache written straight into a bucket is the one written into a folder, whoever writes it and whatever happens."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dflash_pipeline.errors import CacheCorrupt, CacheIncomplete, CacheMismatch, DflashError
from dflash_pipeline.store import bucket_writer as bucket_writer_module
from dflash_pipeline.store import open_cache, verify
from dflash_pipeline.store.bucket import Bucket, Token
from dflash_pipeline.store.bucket_writer import BucketWriter
from dflash_pipeline.store.leases import FINISH, Ranks
from dflash_pipeline.store.publish import publish_cache

pytest.importorskip("obstore", reason="the extra `buckets` is not installed")

Join = Callable[..., BucketWriter]
Write = Callable[[BucketWriter, int], None]


@pytest.fixture
def url(endpoint: str, tmp_path: Path) -> str:
    """An empty place on the server."""
    return f"s3://caches/{tmp_path.name}/written"


@pytest.fixture
def join(synthetic: ModuleType, tmp_path: Path) -> Join:
    """Begin or join the synthetic cache; `changes` go to its identity."""

    def build(url: str, work: str = "work", changes: dict[str, Any] | None = None, **options: Any) -> BucketWriter:
        plan, _ = synthetic.make_plan(synthetic.make_rows(), synthetic.identity(**(changes or {})))
        head, files, versions = synthetic.make_head(), synthetic.target_files, synthetic.VERSIONS
        return BucketWriter.join(url, tmp_path / work, plan, head, files, versions, **options)

    return build


@pytest.fixture
def write(synthetic: ModuleType) -> Write:
    """Write one shard."""
    rows = {row.id: row for row in synthetic.make_rows()}

    def one(writer: BucketWriter, shard: int) -> None:
        names = [writer.plan.row_ids[index] for index in writer.plan.shard_slice(shard)]
        writer.write_shard(shard, [rows[name] for name in names], {})

    return one


def objects(url: str) -> dict[str, bytes]:
    bucket = Bucket(url)
    return {name: bucket.read(name, 2**30) for name in bucket.sizes("")}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def complete(writer: BucketWriter, write: Write) -> list[int]:
    """Write what is missing, finish, and return the shards that this writer computed."""
    done = []
    with writer:
        for shard in writer.claim_shards():
            write(writer, shard)
            done.append(shard)
        writer.finish()
    return done


def fail_at_the_record_of_shard_1(monkeypatch: pytest.MonkeyPatch, writer: BucketWriter, write: Write) -> None:
    real = Bucket.upload

    def failing(self: Bucket, name: str, content: Path | bytes) -> None:
        if name == "shards/00001/record.json":
            raise DflashError("the network is gone")
        real(self, name, content)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "upload", failing)
        with pytest.raises(DflashError, match="the network is gone"):
            complete(writer, write)


@pytest.mark.parametrize("kind", ["s3", "file"])
def test_one_writer_puts_the_bytes_that_a_folder_holds_and_leaves_none_on_the_disk(
    synthetic: ModuleType,
    pristine: Path,
    tmp_path: Path,
    join: Join,
    write: Write,
    kind: str,
    request: pytest.FixtureRequest,
) -> None:
    place = f"file://{tmp_path}/written" if kind == "file" else request.getfixturevalue("url")
    writer = join(place)
    seen = []
    for shard in writer.claim_shards():
        seen.append(files(writer.path / "shards"))
        write(writer, shard)
    with writer:
        manifest = writer.finish()
        assert writer.finish() is manifest
    assert seen == [[]] * 4  # a shard's files go when it is put
    assert manifest.fingerprint == open_cache(pristine).fingerprint == open_cache(place).fingerprint
    assert objects(place) == synthetic.content(pristine)
    assert all(name.endswith("-0.lock") for name in files(tmp_path / "work"))
    assert verify(place)["ok"]
    assert publish_cache(pristine, place)["resumed_shards"] == 4


def test_the_plan_goes_first_a_shard_s_record_after_its_files_and_the_manifest_last(
    join: Join, write: Write, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    upload, put_if = Bucket.upload, Bucket.put_if

    def noted_upload(self: Bucket, name: str, content: Path | bytes) -> None:
        upload(self, name, content)
        order.append(name)

    def noted_put(self: Bucket, name: str, data: bytes, token: Token | None) -> Token | None:
        order.extend([] if name.startswith(".claims/") else [name])
        return put_if(self, name, data, token)

    monkeypatch.setattr(Bucket, "upload", noted_upload)
    monkeypatch.setattr(Bucket, "put_if", noted_put)
    complete(join(url), write)
    assert (order[0], order[-1]) == ("plan.json", "manifest.json")
    for shard in range(4):
        places = [place for place, name in enumerate(order) if name.startswith(f"shards/0000{shard}/")]
        assert order[places[-1]] == f"shards/0000{shard}/record.json"
        assert len(places) > 10


def test_another_machine_goes_on_from_the_shards_in_the_bucket(
    synthetic: ModuleType, pristine: Path, join: Join, write: Write, url: str
) -> None:
    with join(url, "one") as writer:
        for shard in writer.claim_shards():
            if shard == 2:
                break
            write(writer, shard)
        rows = sum(writer.plan.shard_rows[:2])
    with pytest.raises(CacheIncomplete, match="2 shards are there"):
        open_cache(url)
    again = join(url, "two")
    assert (again.missing_shards, again.resumed_rows) == ([2, 3], rows)
    assert complete(again, write) == [2, 3]
    assert objects(url) == synthetic.content(pristine)
    finished = join(url, "three")
    assert (finished.missing_shards, finished.resumed_rows) == ([], 8)
    assert complete(finished, write) == []
    assert objects(url) == synthetic.content(pristine)


def test_a_shard_that_was_finished_and_not_put_is_put_without_computing_it_again(
    synthetic: ModuleType, pristine: Path, join: Join, write: Write, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at_the_record_of_shard_1(monkeypatch, join(url), write)
    assert complete(join(url), write) == [2, 3]
    assert objects(url) == synthetic.content(pristine)


@pytest.mark.parametrize(
    ("field", "value"), [("max_length", 99), ("attention", "eager"), ("layer_ids", (1, 5)), ("template_hash", "x")]
)
def test_another_cache_in_the_place_is_refused_by_the_field(
    join: Join, write: Write, url: str, field: str, value: Any
) -> None:
    with join(url) as writer:
        shards = writer.claim_shards()
        write(writer, next(shards))
        before = {name: data for name, data in objects(url).items() if not name.startswith(".claims/")}
    with pytest.raises(CacheMismatch, match=rf"{url}: holds a cache of other inputs: {field} is .* use another --out"):
        join(url, changes={field: value})
    assert objects(url) == before
    assert complete(join(url), write) == [1, 2, 3]
    with pytest.raises(CacheMismatch, match=f"{field} is "):
        join(url, changes={field: value})


def test_a_place_with_other_things_is_refused(join: Join, url: str) -> None:
    Bucket(url).upload("thesis.tex", b"...")
    with pytest.raises(CacheMismatch, match=r"holds 'thesis.tex' and no plan.json"):
        join(url)
    assert list(objects(url)) == ["thesis.tex"]


def test_what_the_local_folder_holds_of_another_cache_counts_for_nothing(
    synthetic: ModuleType, pristine: Path, join: Join, write: Write, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at_the_record_of_shard_1(monkeypatch, join(url, changes={"attention": "eager"}), write)
    for name in Bucket(url).sizes(""):
        Bucket(url).delete(name)
    assert complete(join(url), write) == [0, 1, 2, 3]  # the shard left over is the other plan's
    assert objects(url) == synthetic.content(pristine)


@pytest.mark.parametrize("damage", ["cut", "gone", "record"])
def test_a_shard_that_is_damaged_in_the_bucket_is_computed_again(
    synthetic: ModuleType, pristine: Path, join: Join, write: Write, url: str, damage: str
) -> None:
    name = f"shards/00002/{'record.json' if damage == 'record' else 'states/4/c/0/0'}"

    def spoil() -> None:
        if damage == "gone":
            Bucket(url).delete(name)
        else:
            Bucket(url).upload(name, synthetic.content(pristine)[name][:-1])

    with join(url) as writer:
        for shard in writer.claim_shards():
            if shard == 3:
                break
            write(writer, shard)
    spoil()
    again = join(url)
    assert list(again.replaced_shards) == [2]
    assert f"{url}/{name}" in again.replaced_shards[2]
    assert complete(again, write) == [2, 3]
    assert objects(url) == synthetic.content(pristine)
    if damage != "record":  # nobody needs the records once there is a manifest, until the shard is read
        spoil()
        with pytest.raises(CacheCorrupt, match=rf"{name}: expected .*; `dflash cache repair {url} --corpus"):
            join(url)
        Bucket(url).delete("manifest.json")
        assert complete(join(url), write) == [2]
        assert objects(url) == synthetic.content(pristine)


def test_two_writers_share_the_shards_and_whoever_is_last_finishes(
    synthetic: ModuleType, pristine: Path, join: Join, write: Write, url: str
) -> None:
    one, two = join(url), join(url)  # one machine: each has a folder of its own
    assert one.path != two.path
    of_one, of_two = one.claim_shards(), two.claim_shards()
    assert [next(of_one), next(of_two)] == [0, 1]
    write(one, 0)
    assert next(of_one) == 2
    write(two, 1)
    assert next(of_two) == 3
    write(two, 3)
    write(one, 2)
    found: list[int] = []
    assert list(one.claim_shards(found.append)) == []
    assert found == [1, 3]
    with one, two:
        assert two.finish() == one.finish()
    assert objects(url) == synthetic.content(pristine)


def test_a_writer_says_that_it_waits_for_anothers_end(
    join: Join, write: Write, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = join(url, lease_seconds=5), join(url, lease_seconds=5)
    for shard in one.claim_shards():
        write(one, shard)
    assert list(two.claim_shards()) == []
    assert one._claims.take(FINISH)
    with one, two, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(two.finish)
        while not caplog.messages and not waiting.done():
            time.sleep(0.01)
        assert one.finish() == waiting.result(timeout=60)
    assert caplog.messages == [
        f"{url}: another worker writes the end of the cache; taken over after 5 s without a sign of life"
    ]


def test_a_writer_that_stood_still_leaves_its_shard_to_the_one_who_took_it(
    synthetic: ModuleType, pristine: Path, join: Join, write: Write, url: str
) -> None:
    slow, quick = join(url, "slow", lease_seconds=1), join(url, "quick", lease_seconds=1)
    shards = slow.claim_shards()
    assert next(shards) == 0
    slow._claims._ended.set()  # type: ignore[union-attr] # the thread that renews stands still with the rest
    assert complete(quick, write) == [1, 2, 3, 0]
    before = objects(url)
    write(slow, 0)
    assert objects(url) == before
    (notice,) = slow.take_notices()
    assert "another writer has taken shard 0 over" in notice
    assert list(shards) == []
    with slow:
        assert slow.finish().fingerprint == open_cache(pristine).fingerprint
    assert objects(url) == before == synthetic.content(pristine)


DYING = """
import importlib.util, os, signal, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("synthetic", sys.argv[1])
synthetic = importlib.util.module_from_spec(spec)
sys.modules["synthetic"] = synthetic
spec.loader.exec_module(synthetic)
from dflash_pipeline.store.bucket import Bucket
from dflash_pipeline.store.bucket_writer import BucketWriter
real = Bucket.upload
def upload(self, name, content):
    if name == "shards/00001/states/4/c/0/0":
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, name, content)
Bucket.upload = upload
plan, rows = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())
writer = BucketWriter.join(sys.argv[2], Path(sys.argv[3]), plan, synthetic.make_head(), synthetic.target_files,
                           synthetic.VERSIONS, lease_seconds=float(sys.argv[4]))
for shard in writer.claim_shards():
    writer.write_shard(shard, [rows[index] for index in plan.shard_slice(shard)], {})
"""


@pytest.mark.parametrize("who", ["another machine", "the same again"])
def test_a_writer_killed_while_it_puts_a_shard_costs_that_shard_and_the_lease(
    synthetic: ModuleType, pristine: Path, tmp_path: Path, join: Join, write: Write, url: str, who: str
) -> None:
    lease = "2" if who == "another machine" else "3000"
    script = [sys.executable, "-c", DYING, str(synthetic.__file__), url, str(tmp_path / "work"), lease]
    assert subprocess.run(script, check=False, timeout=300).returncode == -9
    left = objects(url)
    assert ".claims/00001" in left
    assert {"shards/00000/record.json"} == {name for name in left if name.endswith("record.json")}
    if who == "another machine":
        assert complete(join(url, "elsewhere", lease_seconds=2), write) == [
            2,
            3,
            1,
        ]  # after the others, when the lease is over
    else:
        assert complete(join(url), write) == [2, 3]  # at once; and the shard was whole on the disk
    assert objects(url) == synthetic.content(pristine)
    assert verify(url)["ok"]


def test_where_the_store_cannot_tell_who_was_first_ranks_divide_the_shards(
    synthetic: ModuleType, pristine: Path, tmp_path: Path, join: Join, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranks, "poll_seconds", 0.02)
    place = f"file://{tmp_path}/written"
    done: dict[int, list[int]] = {}

    def rank(number: int) -> None:
        writer = join(place, f"work-{number}", rank=number, world_size=2)
        assert f"worker {number} of 2" in writer.notices[0]
        done[number] = complete(writer, write)

    threads = [threading.Thread(target=rank, args=(number,)) for number in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == {0: [0, 2], 1: [1, 3]}
    assert objects(place) == synthetic.content(pristine)


def test_a_rank_that_never_comes_is_not_waited_for_without_end(
    tmp_path: Path, join: Join, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranks, "poll_seconds", 0.02)
    monkeypatch.setattr(bucket_writer_module, "PATIENCE_SECONDS", 0.3)
    place = f"file://{tmp_path}/written"
    with pytest.raises(DflashError, match=r"no other worker has put a shard for 0.3 s, and 2 of theirs are missing"):
        complete(join(place, rank=0, world_size=2), write)
    assert complete(join(place), write) == [1, 3]  # alone
    assert verify(place)["ok"]
