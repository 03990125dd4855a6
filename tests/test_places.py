"""A cache trains and evaluates wherever it lies: read-only, another user's, in a folder with a space, in a bucket."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from dflash_pipeline.cli import main

SMALL = ["anchors_per_pack=12", "pack_tokens=400", "num_layers=1", "eval_rows=2", "heldout_share=0.2"]
SETS = [word for setting in SMALL for word in ("--set", setting)]
NOBODY = 65534


def train_and_evaluate(cache: str, run: str) -> None:
    """Train two steps, evaluate, and show and verify the cache; all must end well."""
    for command in (
        ["train", "--cache", cache, "--out", run, "--steps", "2", "--device", "cpu", *SETS],
        ["evaluate", "--drafter", run, "--cache", cache, "--device", "cpu", "--json"],
        ["cache", "info", cache],
        ["cache", "verify", cache],
    ):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, result.output


@pytest.fixture
def read_only(tiny_cache: Path) -> Iterator[Path]:
    """A folder anybody may read, with a cache nobody may write, and a folder `out` that anybody may."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    (folder / "out").mkdir()
    (folder / "out").chmod(0o777)
    cache = Path(shutil.copytree(tiny_cache, folder / "cache"))
    for path in [*cache.rglob("*"), cache]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield folder
    for path in [cache, *cache.rglob("*")]:
        path.chmod(path.stat().st_mode | stat.S_IRWXU)
    shutil.rmtree(folder)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_read_only_cache_of_another_user_trains_and_evaluates(read_only: Path) -> None:
    for name in (
        "train.loop",
        "train.recipes",
        "evaluate.offline",
        "evaluate.render",
        "store.integrity",
        "store.render",
    ):
        importlib.import_module(f"dflash_pipeline.{name}")  # nobody may not be able to read this installation
    before = sorted((path, path.stat().st_mtime_ns) for path in (read_only / "cache").rglob("*"))

    def as_nobody() -> None:
        if os.geteuid() == 0:  # root ignores modes
            os.setuid(NOBODY)
        assert not os.access(read_only / "cache", os.W_OK)
        train_and_evaluate(str(read_only / "cache"), str(read_only / "out/run"))

    child = multiprocessing.get_context("fork").Process(target=as_nobody)
    child.start()
    child.join(300)
    assert child.exitcode == 0
    assert sorted((path, path.stat().st_mtime_ns) for path in (read_only / "cache").rglob("*")) == before


def test_a_cache_moved_into_a_folder_with_a_space_trains_by_a_relative_path(
    tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_cache, tmp_path / "my dir" / "cache")
    monkeypatch.chdir(tmp_path / "my dir")
    train_and_evaluate("cache", "../a run")


@pytest.mark.skipif(importlib.util.find_spec("obstore") is None, reason="the extra `buckets` is not installed")
def test_a_published_cache_trains_and_evaluates_by_its_url(tiny_cache: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    published = CliRunner().invoke(main, ["cache", "publish", str(tiny_cache), url, "--json"])
    assert published.exit_code == 0, published.output
    train_and_evaluate(url, str(tmp_path / "run"))
