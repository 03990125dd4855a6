"""A disk that fills up in the middle of a shard: one line, nothing half, and the same command goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_pipeline.errors import DflashError
from dflash_pipeline.extract import ExtractConfig, SilentProgress, run_extract
from dflash_pipeline.store import verify


class Filler(SilentProgress):
    """Fills the disk, but for some bytes, when so many batches are done."""

    def __init__(self, disk: Path, after: int, leave: int) -> None:
        self.ballast, self.after, self.leave = disk / "ballast", after, leave

    def advance(self, num_tokens: int, num_padding: int) -> None:  # noqa: ARG002
        self.after -= 1
        if self.after == 0:
            free = os.statvfs(self.ballast.parent)
            self.ballast.write_bytes(bytes(free.f_bavail * free.f_frsize - self.leave))


@pytest.mark.parametrize(("after", "leave"), [(1, 0), (3, 40_000), (5, 90_000)])
def test_a_full_disk_is_one_line_and_the_same_command_goes_on(
    settings: Callable[..., ExtractConfig], small_disk: Path, tmp_path: Path, after: int, leave: int
) -> None:
    changes = {"shard_tokens": 250, "batch_tokens": 5000, "limit_rows": 20}
    clean = run_extract(settings(**changes, out=tmp_path / "clean"))
    config = settings(**changes, out=small_disk / "cache")
    filler = Filler(small_disk, after, leave)
    with pytest.raises(DflashError, match="no space left on the disk; the shards written so far are safe") as found:
        run_extract(config, filler)
    assert "\n" not in str(found.value)
    shards = sorted(path.name for path in (config.out / "shards").iterdir())
    assert shards == [f"{shard:05d}" for shard in range(after - 1)]
    assert not (config.out / "manifest.json").exists()
    filler.ballast.unlink()
    result = run_extract(config)
    assert (result["resumed_rows"] > 0) == (after > 1)
    assert result["fingerprint"] == clean["fingerprint"]
    assert verify(config.out)["ok"]
