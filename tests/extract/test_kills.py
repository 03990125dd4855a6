"""Kill -9 at random moments, two workers, small shards: what was finished is kept, and the end is the clean run's.

Three kills by default; `make kill-test` does twenty.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
import traceback
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from dflash_pipeline.errors import CacheIncomplete
from dflash_pipeline.extract import ExtractConfig, SilentProgress, run_extract
from dflash_pipeline.store import open_cache, verify

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),  # the children extract, and die
]


class Starts(SilentProgress):
    """Notes how many tokens were done when a worker began."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def start(self, num_tokens: int, num_done: int) -> None:  # noqa: ARG002
        with self.log.open("a") as file:
            file.write(f"{num_done}\n")


def work(config: ExtractConfig, log: Path) -> None:
    """One worker, in a process of its own."""
    try:
        run_extract(config, Starts(log))
    except BaseException:
        log.with_suffix(".error").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def content(cache: Path) -> dict[str, bytes]:
    found = [path for path in cache.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(cache).as_posix(): path.read_bytes() for path in found}


def num_shards(cache: Path) -> int:
    return sum(path.name.isdecimal() for path in (cache / "shards").glob("*"))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "nothing goes on"
        time.sleep(0.002)


def test_random_kills_keep_what_is_finished_and_change_nothing(
    settings: Callable[..., ExtractConfig],
    chat_corpus: Path,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kills = int(pytestconfig.getoption("--kills"))
    rows = [json.loads(line) for line in chat_corpus.read_text().splitlines()]
    corpus = tmp_path / "rows.jsonl"
    count = 8 * kills + 12
    corpus.write_text("".join(json.dumps({**rows[n % 37], "id": n}) + "\n" for n in range(count)))
    config = settings(corpus=(corpus,), shard_tokens=60)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        clean = run_extract(settings(corpus=(corpus,), shard_tokens=60, out=tmp_path / "clean"))
    source = random.Random(kills)
    log = tmp_path / "starts.log"
    context = multiprocessing.get_context("fork")

    def started() -> ForkProcess:
        process = context.Process(target=work, args=(config, log))
        process.start()
        return process

    workers = [started(), started()]
    for kill in range(kills):
        before = num_shards(config.out)
        wait_for(lambda before=before: num_shards(config.out) > before)  # type: ignore[misc]
        time.sleep(source.uniform(0, 0.3))
        victims = [0, 1] if kill % 3 == 2 else [source.randrange(2)]
        for victim in victims:
            workers[victim].kill()
            workers[victim].join()
            assert workers[victim].exitcode == -9, log.with_suffix(".error").read_text()
        with pytest.raises(CacheIncomplete):
            open_cache(config.out)
        for victim in victims:
            workers[victim] = started()
    for worker in workers:
        worker.join(300)
    assert [worker.exitcode for worker in workers] == [0, 0]
    resumed = [int(line) for line in log.read_text().split()]
    assert resumed == sorted(resumed)
    assert resumed[-1] > 0
    assert len(set(resumed)) > kills // 2
    assert open_cache(config.out).fingerprint == clean["fingerprint"]
    assert content(config.out) == content(tmp_path / "clean")
    assert verify(config.out)["ok"]
