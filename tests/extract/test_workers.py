"""Many workers, however they are started, make the cache that one makes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_pipeline.extract import ExtractConfig, fill, run_extract

Settings = Callable[..., ExtractConfig]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path, chat_corpus: Path) -> dict[str, Any]:
    """The result of one worker."""
    out = tmp_path_factory.mktemp("alone") / "cache"
    return run_extract(
        ExtractConfig(
            corpus=(chat_corpus,),
            target=str(tiny_target_dir),
            out=out,
            device="cpu",
            batch_tokens=500,
            shard_tokens=150,
        )
    )


def content(cache: Path | str) -> dict[str, bytes]:
    found = [path for path in Path(cache).rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(cache).as_posix(): path.read_bytes() for path in found}


def slowly(monkeypatch: pytest.MonkeyPatch, then: Callable[[int], None] = lambda _: None) -> list[int]:
    """Let this process take its time over a shard, so that others get theirs; return the shards it does."""
    real, done = fill.compute_shard, []

    def compute(*arguments: Any) -> Any:
        done.append(arguments[3])
        time.sleep(1.0 if len(done) > 1 else 8.0)  # the others start, load the target, and claim
        then(len(done))
        return real(*arguments)

    monkeypatch.setattr(fill, "compute_shard", compute)
    return done


def test_two_workers_share_the_shards_and_write_the_same_cache(
    settings: Settings, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = slowly(monkeypatch)
    threads = torch.get_num_threads()
    config = settings(shard_tokens=150, num_workers=2)
    result = run_extract(config)
    num_shards = len(list((config.out / "shards").iterdir()))
    assert 0 < len(done) < num_shards
    assert result["fingerprint"] == alone["fingerprint"]
    assert content(config.out) == content(alone["cache"])
    assert result["notices"] == []
    assert torch.get_num_threads() == threads
    assert not multiprocessing.active_children()


def test_a_worker_that_is_killed_costs_its_current_shard(
    settings: Settings, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(num_done: int) -> None:
        for child in multiprocessing.active_children() if num_done == 1 else ():
            os.kill(child.pid or 0, signal.SIGKILL)
            child.join()

    slowly(monkeypatch, kill)
    config = settings(shard_tokens=150, num_workers=2)
    result = run_extract(config)
    assert result["notices"] == ["worker 1 of 2 failed (exit code -9): the others did its work"]
    assert result["fingerprint"] == alone["fingerprint"]
    assert content(config.out) == content(alone["cache"])


@pytest.mark.parametrize("how", ["by hand", "torchrun"])
def test_the_same_command_several_times_shares_the_work_and_each_ends_well(
    settings: Settings, alone: dict[str, Any], chat_corpus: Path, how: str
) -> None:
    config = settings()
    command = ["-m", "dflash_pipeline.cli", "extract", "--json", "--corpus", str(chat_corpus), "--device", "cpu"]
    command += ["--target", config.target, "--out", str(config.out), "--batch-tokens", "500", "--shard-tokens", "150"]
    launcher = [sys.executable]
    if how == "torchrun":
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29611"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.Popen(
            [*launcher, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(2 if how == "by hand" else 1)
    ]
    outputs = [process.communicate(timeout=240) for process in runs]
    assert [process.returncode for process in runs] == [0] * len(runs), outputs
    for printed, _ in outputs:
        (line,) = printed.splitlines()
        assert json.loads(line)["fingerprint"] == alone["fingerprint"]
    assert content(config.out) == content(alone["cache"])


def test_each_worker_has_a_gpu_of_its_own(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    devices = [settings(device="auto", worker=worker).target_config().device for worker in range(4)]
    assert devices == ["auto", "cuda:1", "cuda:0", "cuda:1"]
    assert settings(device="cuda:1", worker=2).target_config().device == "cuda:1"
