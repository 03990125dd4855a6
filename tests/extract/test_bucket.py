"""Extraction straight into a bucket: the cache is the local one, whoever shares the work and whoever dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_pipeline.cli import main
from dflash_pipeline.errors import CacheMismatch, ConfigError, DflashError
from dflash_pipeline.extract import ExtractConfig, SilentProgress, estimate, fill, run, run_extract
from dflash_pipeline.store import verify
from dflash_pipeline.store.bucket import Bucket

pytest.importorskip("obstore", reason="the extra `buckets` is not installed")

Settings = Callable[..., ExtractConfig]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path, chat_corpus: Path) -> dict[str, Any]:
    """The result of one worker that writes into a folder."""
    out = tmp_path_factory.mktemp("alone") / "cache"
    common: dict[str, Any] = {"corpus": (chat_corpus,), "target": str(tiny_target_dir), "device": "cpu"}
    return run_extract(ExtractConfig(**common, out=out, batch_tokens=500, shard_tokens=300))


@pytest.fixture
def url(endpoint: str, tmp_path: Path) -> str:
    """An empty place on the server."""
    return f"s3://caches/{tmp_path.name}/extracted"


def content(cache: Path) -> dict[str, bytes]:
    found = [path for path in cache.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(cache).as_posix(): path.read_bytes() for path in found}


def objects(url: str) -> dict[str, bytes]:
    bucket = Bucket(url)
    return {name: bucket.read(name, 2**30) for name in bucket.sizes("")}


def num_records(url: str) -> int:
    return sum(name.endswith("/record.json") for name in Bucket(url).sizes("shards"))


def command(config: ExtractConfig, url: str, work: Path) -> list[str]:
    return [
        *("extract", "--json", "--corpus", str(config.corpus[0]), "--target", config.target, "--device", "cpu"),
        *("--out", url, "--work", str(work), "--batch-tokens", "500", "--shard-tokens", "300"),
    ]


def started(arguments: list[str], **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dflash_pipeline.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )


def test_one_worker_puts_the_cache_that_a_folder_holds_and_a_second_run_computes_nothing(
    settings: Settings, alone: dict[str, Any], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(out=url, work=tmp_path / "work", shard_tokens=300)
    result = run_extract(config)
    assert objects(url) == content(Path(alone["cache"]))
    changing = {"cache", "seconds", "tokens_per_second"}
    assert {**result, **dict.fromkeys(changing)} == {**alone, **dict.fromkeys(changing)}
    assert result["cache"] == url
    assert [path for path in (tmp_path / "work").rglob("*") if path.is_file() and path.suffix != ".lock"] == []
    assert verify(url)["ok"]
    monkeypatch.setattr(fill, "compute_shard", lambda *_: pytest.fail("computed again"))
    again = run_extract(settings(out=url, work=tmp_path / "elsewhere", shard_tokens=300))
    assert (again["resumed_rows"], again["fingerprint"]) == (37, alone["fingerprint"])
    with pytest.raises(CacheMismatch, match=f"{url}: holds a cache of other inputs: max_length is 4096 there, 50 now"):
        run_extract(settings(out=url, work=tmp_path / "work", shard_tokens=300, max_length=50))
    assert objects(url) == content(Path(alone["cache"]))


def test_two_processes_that_share_nothing_but_the_bucket_share_the_shards(
    settings: Settings, alone: dict[str, Any], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(out=url, work=tmp_path / "here", shard_tokens=300)
    real, done = fill.compute_shard, []

    def compute(*arguments: Any) -> Any:
        done.append(arguments[3])
        deadline = time.monotonic() + 300
        while len(done) == 1 and not num_records(url):  # until the other one has got something done
            assert time.monotonic() < deadline, other.communicate()
            time.sleep(0.1)
        return real(*arguments)

    monkeypatch.setattr(fill, "compute_shard", compute)
    other = started(command(config, url, tmp_path / "there"))
    result = run_extract(config)
    printed, errors = other.communicate(timeout=300)
    assert other.returncode == 0, errors
    assert 0 < len(done) < len(list((Path(alone["cache"]) / "shards").iterdir()))
    assert json.loads(printed)["fingerprint"] == result["fingerprint"] == alone["fingerprint"]
    assert objects(url) == content(Path(alone["cache"]))


KILLED = """
import os, signal, sys
from pathlib import Path
from dflash_pipeline.extract import ExtractConfig, fill, run
real, done = fill.compute_shard, []
def compute(*arguments):
    done.append(arguments[3])
    if len(done) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments)
fill.compute_shard = compute
corpus, target, out, work = sys.argv[1:]
run.run_extract(ExtractConfig(corpus=(Path(corpus),), target=target, out=out, work=Path(work), device="cpu",
                              batch_tokens=500, shard_tokens=300, lease_seconds=2))
"""


def test_a_worker_killed_in_mid_shard_costs_that_shard_and_the_lease(
    settings: Settings, alone: dict[str, Any], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(out=url, work=tmp_path / "here", shard_tokens=300, lease_seconds=2)
    script = [sys.executable, "-c", KILLED, str(config.corpus[0]), config.target, url, str(tmp_path / "there")]
    assert subprocess.run(script, check=False, timeout=300).returncode == -9
    assert (num_records(url), sorted(Bucket(url).sizes(".claims"))) == (2, [".claims/00002"])
    real, done = fill.compute_shard, []
    monkeypatch.setattr(fill, "compute_shard", lambda *given: (done.append(given[3]), real(*given))[1])
    result = run_extract(config)
    count = len(list((Path(alone["cache"]) / "shards").iterdir()))
    assert done == [*range(3, count), 2]  # the dead one's last, when its lease was over
    assert 0 < result["resumed_rows"] < 37
    assert result["fingerprint"] == alone["fingerprint"]
    assert objects(url) == content(Path(alone["cache"]))


def test_without_conditional_writes_the_ranks_of_torchrun_divide_the_shards_and_the_first_speaks(
    settings: Settings, alone: dict[str, Any], tmp_path: Path
) -> None:
    place = f"file://{tmp_path}/bucket"
    arguments = command(settings(), place, tmp_path / "work")
    ranks = [started(arguments, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2") for rank in range(2)]
    outputs = [process.communicate(timeout=300) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    result = json.loads(outputs[0][0])
    assert outputs[1][0] == ""
    assert result["fingerprint"] == alone["fingerprint"]
    (notice,) = result["notices"]
    assert notice.startswith(f"{place}: the store has no conditional writes")
    assert "worker 0 of 2" in notice
    assert objects(place) == content(Path(alone["cache"]))


def test_the_workers_of_every_rank_have_a_rank_of_their_own(settings: Settings) -> None:
    config = settings(out="file:///nowhere", rank=2, world_size=3, num_workers=4)
    ranks = [config.for_worker(number) for number in range(4)]
    assert [(part.rank, part.world_size, part.num_workers) for part in ranks] == [(n, 12, 1) for n in range(8, 12)]
    assert [part.for_worker(0).rank for part in ranks] == [8, 9, 10, 11]  # what the started process makes of it


def test_a_small_disk_is_enough_for_a_bucket_if_a_shard_fits(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"file://{tmp_path}/bucket"
    here, there = settings(shard_tokens=300), settings(out=place, work=tmp_path / "work", shard_tokens=300)
    needed = run_extract(settings(dry_run=True, shard_tokens=300))["estimated_bytes"]
    monkeypatch.setattr(estimate, "free_bytes", lambda _: needed * 2 // 3)
    with pytest.raises(ConfigError, match=r"needs about .* choose another --out"):
        run_extract(here)
    assert run_extract(there)["rows"] == 37
    monkeypatch.setattr(estimate, "free_bytes", lambda _: 1000)
    with pytest.raises(ConfigError, match=r"work: a shard of each worker.* has 1.00 KB free: .* another --work"):
        run_extract(there)


def test_what_a_bucket_cannot_do_is_one_line(settings: Settings, tmp_path: Path) -> None:
    config, place = settings(), f"file://{tmp_path}/bucket"
    for arguments, line in [
        ([*command(config, place, tmp_path / "w"), "--append"], f"dflash: {place}: --append extends a folder"),
        ([*command(config, "ftp://host/c", tmp_path / "w")], "dflash: ftp://host/c: expected a folder, or a URL"),
        ([*command(config, str(tmp_path / "c"), tmp_path / "w")], f"dflash: work {tmp_path}/w: only an output in a"),
    ]:
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 1, result.output
        assert line in result.stderr.splitlines()[-1]


def test_a_place_that_cannot_be_written_is_refused_before_the_corpus_is_read(
    settings: Settings, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "open_sources", lambda _: pytest.fail("the corpus is read"))
    (tmp_path / "file").touch()
    bucket = f"file://{tmp_path}/bucket"
    for changes, message in (
        ({"out": "ftp://host/c"}, "^ftp://host/c: expected a folder, or a URL"),
        ({"out": "ftp://host/c", "dry_run": True}, "^ftp://host/c: expected a folder, or a URL"),
        ({"out": "s3://missing/c"}, "^s3://missing/c: there is no such bucket"),
        ({"out": bucket, "work": tmp_path / "file"}, "file: is a file; use another --work"),
        (
            {"out": bucket, "work": tmp_path / "file/work"},
            "work: cannot be made, for .*file is a file; use",
        ),
    ):
        with pytest.raises(DflashError, match=message):
            run_extract(settings(**{"work": tmp_path / "work", **changes}))


@pytest.mark.skipif(not hasattr(os, "setresuid"), reason="no such users on this system")
@pytest.mark.parametrize("option", ["out", "work"])
def test_a_folder_of_another_user_is_refused_before_the_corpus_is_read(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(run, "open_sources", lambda _: pytest.fail("the corpus is read"))
    changes = {"out": f"file://{tmp_path}/bucket"} if option == "work" else {}
    config = settings(**{**changes, option: tmp_path / "folder/place"})
    (tmp_path / "folder").mkdir(mode=0o555)
    if os.getuid() == 0:  # root ignores modes
        os.setresuid(65534, 65534, 0)
    try:
        with pytest.raises(DflashError, match=f"place: cannot be written, for .* use another --{option}"):
            run_extract(config)
    finally:
        if os.getresuid()[2] == 0:
            os.setresuid(0, 0, 0)


def test_another_cache_at_a_url_is_refused_by_what_can_be_done_about_a_url(
    settings: Settings, chat_corpus: Path, tmp_path: Path
) -> None:
    place = f"file://{tmp_path}/bucket"
    other = tmp_path / "other.jsonl"
    other.write_text("".join(chat_corpus.read_text().splitlines(keepends=True)[4:9]))
    run_extract(settings(out=place, work=tmp_path / "work", limit_tokens=500))
    with pytest.raises(CacheMismatch, match=r"corpus is .* now; use another --out, or delete what is there$"):
        run_extract(settings(out=place, work=tmp_path / "work", limit_tokens=500, corpus=(other,)))
    with pytest.raises(CacheMismatch, match=r"limit_tokens is 500 there, not given now; use another"):
        run_extract(settings(out=place, work=tmp_path / "work"))


class Notes(SilentProgress):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def notice(self, text: str) -> None:
        self.lines.append(text)


def test_a_wait_for_a_silent_worker_is_told_once(settings: Settings, url: str, tmp_path: Path) -> None:
    config = settings(out=url, work=tmp_path / "here", shard_tokens=300, lease_seconds=1, limit_rows=4)
    for shard in range(4):  # claims of a worker that is dead
        claim = json.dumps({"owner": "dead", "lease_seconds": 1}).encode()
        Bucket(url).upload(f".claims/{shard:05d}", claim)
    notes = Notes()
    assert run_extract(config, notes)["rows"] == 4
    shards = ", ".join(str(shard) for shard in range(num_records(url)))
    said = f"waiting for shards {shards}, which other workers hold; taken over after 1 s without a sign of life"
    assert [line for line in notes.lines if line.startswith("waiting")] == [said]
