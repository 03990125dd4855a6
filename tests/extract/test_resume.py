"""An extraction that is killed ends, when it is run again, with the bytes of one that was not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dflash_pipeline.extract import ExtractConfig, run_extract
from dflash_pipeline.store import open_cache

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
    return {
        str(file.relative_to(cache)): file.read_bytes()
        for file in cache.rglob("*")
        if file.is_file() and file.name != ".lock"
    }


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


def test_killed_and_resumed_equals_uninterrupted(settings: Callable[..., ExtractConfig], tmp_path: Path) -> None:
    whole = settings(shard_tokens=400, out=tmp_path / "whole")
    expected = run_extract(whole)
    broken = settings(shard_tokens=400, out=tmp_path / "broken")
    kill_after(broken, 2)
    first = shards(broken.out)
    assert 2 <= len(first) < len(shards(whole.out))
    assert not (broken.out / "manifest.json").exists()
    kill_after(broken, len(first) + 1)
    result = run_extract(broken)
    assert 0 < result["resumed_rows"] <= result["rows"] == 37
    assert result["fingerprint"] == expected["fingerprint"]
    assert contents(broken.out) == contents(whole.out)
    assert open_cache(broken.out).row_ids == open_cache(whole.out).row_ids
