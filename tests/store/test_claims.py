"""Several writers of one cache: each shard is written once, and a dead writer's claim holds nobody up."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import ModuleType

import pytest

from dflash_pipeline.errors import CacheIncomplete, CacheMismatch, DflashError
from dflash_pipeline.store import open_cache
from dflash_pipeline.store import writer as writer_module
from dflash_pipeline.store.claims import Claims, exclusive

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),  # the children only write, and die
]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "POLL_SECONDS", 0.01)


def write_claimed(synthetic: ModuleType, cache: Path, log: Path | None = None, delay: float = 0.0) -> None:
    """Write what can be claimed of the default cache, and finish it; note each shard that was written here."""
    plan, ordered = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())
    with synthetic.open_writer(cache, plan) as writer:
        for shard in writer.claim_shards():
            time.sleep(delay)
            writer.write_shard(shard, [ordered[index] for index in plan.shard_slice(shard)], {})
            if log is not None:
                with log.open("a") as file:
                    file.write(f"{shard}\n")
        writer.finish()


def test_writers_in_turn_share_the_shards_and_both_finish(
    synthetic: ModuleType, pristine: Path, tmp_path: Path
) -> None:
    plan, ordered = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())
    first, second = synthetic.open_writer(tmp_path / "c", plan), synthetic.open_writer(tmp_path / "c", plan)
    found: list[int] = []
    queues = [(first, first.claim_shards()), (second, second.claim_shards(found.append))]
    held = [(writer, next(queue)) for writer, queue in queues]
    assert [shard for _, shard in held] == [0, 1]
    with pytest.raises(CacheMismatch, match="shard 0 is being written by another process"):
        second.write_shard(0, [ordered[index] for index in plan.shard_slice(0)], {})
    for writer, shard in held:
        writer.write_shard(shard, [ordered[index] for index in plan.shard_slice(shard)], {})
    with pytest.raises(CacheIncomplete, match="2 of 4"):
        second.finish()
    for shard in queues[0][1]:
        first.write_shard(shard, [ordered[index] for index in plan.shard_slice(shard)], {})
    assert list(queues[1][1]) == []
    assert found == [2, 3]  # `finish` had seen shard 0
    assert first.finish() == second.finish()
    assert (first.resumed_rows, second.resumed_rows) == (0, 0)
    assert synthetic.content(tmp_path / "c") == synthetic.content(pristine)


def test_processes_started_together_write_every_shard_once(
    synthetic: ModuleType, pristine: Path, tmp_path: Path
) -> None:
    import multiprocessing

    path, log = tmp_path / "c", tmp_path / "log"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=write_claimed, args=(synthetic, path, log, 0.01)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert sorted(log.read_text().split()) == ["0", "1", "2", "3"]
    assert synthetic.content(path) == synthetic.content(pristine)
    assert not (path / ".claims").exists()


def test_what_a_killed_writer_held_goes_to_another(synthetic: ModuleType, pristine: Path, tmp_path: Path) -> None:
    path = tmp_path / "c"
    plan, ordered = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())
    with synthetic.open_writer(path, plan) as writer:
        child = os.fork()
        if child == 0:  # claims a shard, leaves half of it beside its place, and hangs
            queue = synthetic.open_writer(path, plan).claim_shards()
            (path / f"shards/.tmp-{next(queue):05d}-dead").mkdir()
            time.sleep(60)
            os._exit(1)
        deadline = time.monotonic() + 30
        while not list((path / "shards").glob(".tmp-*")) and time.monotonic() < deadline:
            time.sleep(0.005)
        taken = []
        for shard in writer.claim_shards():
            taken.append(shard)
            writer.write_shard(shard, [ordered[index] for index in plan.shard_slice(shard)], {})
            if len(taken) == 3:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        assert taken == [1, 2, 3, 0]
        writer.finish()
    assert not list(path.rglob(".tmp-*"))
    assert synthetic.content(path) == synthetic.content(pristine)


def test_a_writer_of_another_plan_cannot_join(synthetic: ModuleType, tmp_path: Path) -> None:
    plan, _ = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())
    other, _ = synthetic.make_plan(synthetic.make_rows(), synthetic.identity(max_length=99))
    with (
        synthetic.open_writer(tmp_path / "c", plan),
        pytest.raises(CacheMismatch, match="max_length is not given there, 99 now"),
    ):
        synthetic.open_writer(tmp_path / "c", other)


def test_a_shard_that_is_damaged_is_cleared_only_by_who_claims_it(
    synthetic: ModuleType, cache: Path, pristine: Path
) -> None:
    (cache / "manifest.json").unlink()
    (cache / "shards/00002/tokens/c/0").unlink()
    plan, ordered = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())
    first, second = synthetic.open_writer(cache, plan), synthetic.open_writer(cache, plan)
    assert (cache / "shards/00002").is_dir()
    assert next(first.claim_shards()) == 2
    assert not (cache / "shards/00002").exists()
    first.close()
    synthetic.write_missing(second, ordered)
    second.finish()
    assert synthetic.content(cache) == synthetic.content(pristine)


def test_a_finished_cache_is_joined_without_work(synthetic: ModuleType, cache: Path, pristine: Path) -> None:
    write_claimed(synthetic, cache)
    assert synthetic.content(cache) == synthetic.content(pristine)
    assert open_cache(cache).num_rows == 8


def test_a_lock_that_is_never_let_go_of_is_one_line(tmp_path: Path) -> None:
    message = r"another process has held .*\.lock for 0\.05 s"
    with exclusive(tmp_path), pytest.raises(DflashError, match=message) as found, exclusive(tmp_path, 0.05):
        pass
    assert "\n" not in str(found.value)
    with exclusive(tmp_path, wait_seconds=0):
        pass


def test_claims_exclude_each_other_until_they_are_released(tmp_path: Path) -> None:
    ours, theirs = Claims(tmp_path), Claims(tmp_path)
    assert ours.take(3)
    assert ours.take(3)
    assert not theirs.take(3)
    assert theirs.take(4)
    ours.release(3)
    assert theirs.take(3)
    theirs.release_all()
    assert ours.take(4)
    ours.remove()
    assert list(tmp_path.iterdir()) == []
