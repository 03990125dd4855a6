"""An extraction that is killed ends, when it is run again, with the bytes of one that was not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_pipeline.extract import ExtractConfig, run_extract
from dflash_pipeline.store import CacheWriter, open_cache

PROGRAM = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from dflash_pipeline.extract import ExtractConfig, run_extract
corpus, target, out = sys.argv[1:]
run_extract(ExtractConfig(corpus=(Path(corpus),), target=target, out=Path(out), device="cpu", batch_tokens=500,
                          shard_tokens=400))
"""


def contents(cache: Path) -> dict[str, bytes]:
    """Every file of a cache but its lock."""
    files = [file for file in cache.rglob("*") if file.is_file() and file.name != ".lock"]
    return {str(file.relative_to(cache)): file.read_bytes() for file in files}


def shards(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "shards").glob("[0-9]*"))


def kill_after(config: ExtractConfig, num_shards: int) -> None:
    """Run the extraction in a process of its own and kill it once so many shards are there."""
    arguments = [str(config.corpus[0]), config.target, str(config.out)]
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while len(shards(config.out)) < num_shards and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def interrupt_after(config: ExtractConfig, num_shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the extraction here and interrupt it while it writes the shard after so many more."""
    real, written = CacheWriter.write_shard, []

    def write_shard(self: CacheWriter, shard: int, *arguments: Any) -> None:
        if len(written) == num_shards:
            raise KeyboardInterrupt
        real(self, shard, *arguments)
        written.append(shard)

    with monkeypatch.context() as patch:
        patch.setattr(CacheWriter, "write_shard", write_shard)
        with pytest.raises(KeyboardInterrupt):
            run_extract(config)


def test_killed_and_interrupted_and_resumed_equals_uninterrupted(
    settings: Callable[..., ExtractConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = settings(shard_tokens=400, out=tmp_path / "whole")
    expected = run_extract(whole)
    broken = settings(shard_tokens=400, out=tmp_path / "broken")
    kill_after(broken, 2)
    num_first = len(shards(broken.out))
    assert 2 <= num_first < len(shards(whole.out)) - 2
    interrupt_after(broken, 1, monkeypatch)
    assert len(shards(broken.out)) == num_first + 1
    assert not (broken.out / "manifest.json").exists()
    result = run_extract(broken)
    assert 0 < result["resumed_rows"] < result["rows"] == 37
    assert result["fingerprint"] == expected["fingerprint"]
    assert contents(broken.out) == contents(whole.out)
    assert open_cache(broken.out).row_ids == open_cache(whole.out).row_ids
