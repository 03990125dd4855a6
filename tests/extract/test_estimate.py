"""The size of a cache is known before the first forward, and a full disk is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_pipeline.errors import ConfigError
from dflash_pipeline.extract import ExtractConfig, SilentProgress, estimate, run_extract
from dflash_pipeline.store.manifest import read_manifest
from dflash_pipeline.store.render import size

Settings = Callable[..., ExtractConfig]


class Notes(SilentProgress):
    """Keeps what the user is told, and in what order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def notice(self, text: str) -> None:
        self.events.append(text)

    def start(self, num_tokens: int, num_done: int) -> None:  # noqa: ARG002
        self.events.append("start")


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"keep_final": True, "shard_tokens": 32768}])
def test_the_estimate_is_within_ten_percent_and_comes_first(settings: Settings, changes: dict[str, Any]) -> None:
    notes = Notes()
    config = settings(limit_rows=20, **changes)
    result = run_extract(config, notes)
    real = sum(file.stat().st_size for file in config.out.rglob("*") if file.is_file())
    assert abs(result["estimated_bytes"] - real) < 0.1 * real
    assert "the cache takes about" in notes.events[0]
    assert "start" in notes.events[1:]


def test_a_dry_run_reads_the_corpus_and_writes_nothing(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_pipeline.extract import run

    monkeypatch.setattr(run, "load_target", lambda *_: pytest.fail("a dry run loads no weights"))
    config = settings(dry_run=True)
    result = run_extract(config)
    assert result["rows"] == 37
    assert result["tokens"] > 1000
    assert result["estimated_bytes"] > result["tokens"]
    assert result["free_bytes"] > 0
    assert not config.out.exists()


def test_too_small_a_disk_is_refused_before_the_weights_are_loaded(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_pipeline.extract import run

    monkeypatch.setattr(estimate, "free_bytes", lambda _: 1000)
    monkeypatch.setattr(run, "load_target", lambda *_: pytest.fail("no weights are loaded"))
    config = settings()
    with pytest.raises(ConfigError, match=r"needs about [1-9][0-9.]* MB more and the disk has 1.00 KB free"):
        run_extract(config)
    assert not config.out.exists()


def test_what_is_already_written_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "free_bytes", lambda _: 1000)
    with pytest.raises(ConfigError):
        estimate.check_space(tmp_path / "cache", 5000)
    (tmp_path / "cache" / "deep").mkdir(parents=True)
    (tmp_path / "cache" / "deep" / "file").write_bytes(bytes(4000))
    estimate.check_space(tmp_path / "cache", 5000)


def test_the_estimate_of_an_extension_tells_the_new_from_the_whole(
    settings: Settings, chat_corpus: Path, tmp_path: Path
) -> None:
    lines = chat_corpus.read_text().splitlines(keepends=True)
    for name, part in (("old", lines[:8]), ("new", lines[8:12])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    run_extract(settings(corpus=(tmp_path / "old.jsonl",)))
    notes, append = Notes(), settings(corpus=(tmp_path / "new.jsonl",), append=True)
    there = size(read_manifest(append.folder).num_bytes)
    run_extract(append, notes)
    assert f" to add: with the {there} that are there the cache takes about " in notes.events[0]
    whole = size(read_manifest(append.folder).num_bytes)
    notes = Notes()
    run_extract(append, notes)
    assert f", in the cache already: all of it takes {whole}, " in notes.events[0]


def test_a_finished_cache_needs_no_space(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_extract(settings())
    monkeypatch.setattr(estimate, "free_bytes", lambda _: 0)
    monkeypatch.setattr(estimate, "stored_bytes", lambda _: 0)
    assert run_extract(settings())["fingerprint"] == first["fingerprint"]


def test_free_space_is_that_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    assert estimate.free_bytes(tmp_path / "not" / "yet" / "there") > 0
