"""A cache in a bucket is repaired there: what is bad is computed and put again, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_pipeline.errors import ConfigError, DflashError
from dflash_pipeline.extract import repair as repair_module
from dflash_pipeline.extract.repair import RepairConfig, run_repair
from dflash_pipeline.store import bucket_repair, open_cache, verify
from dflash_pipeline.store.bucket import Bucket
from dflash_pipeline.store.leases import FINISH, Leases
from dflash_pipeline.store.publish import publish_cache

pytest.importorskip("obstore", reason="the extra `buckets` is not installed")


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, whole: Path, tmp_path: Path) -> str:
    """A copy of it, in a bucket and behind a file:// URL."""
    if request.param == "s3":
        request.getfixturevalue("endpoint")
    place = f"s3://caches/{tmp_path.name}/repair" if request.param == "s3" else f"file://{tmp_path}/bucket"
    publish_cache(whole, place)
    return place


@pytest.fixture
def given(url: str, tiny_target_dir: Path, chat_corpus: Path) -> RepairConfig:
    return RepairConfig(cache=url, corpus=(chat_corpus,), target=str(tiny_target_dir), device="cpu")


def objects(url: str) -> dict[str, bytes]:
    bucket = Bucket(url)
    return {name: bucket.read(name, 2**30) for name in bucket.sizes("")}


def flip(url: str, name: str) -> None:
    data = bytearray(Bucket(url).read(name, 2**30))
    data[len(data) // 2] ^= 8
    Bucket(url).upload(name, bytes(data))


def test_just_what_is_bad_is_made_and_put_again(given: RepairConfig, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = objects(url)
    flip(url, "shards/00001/states/1/c/0/0")
    Bucket(url).delete("shards/00003/tokens/c/0")
    Bucket(url).delete("shards/00004/record.json")
    flip(url, "plan.json")
    flip(url, "stats.safetensors")
    Bucket(url).delete("target/tokenizer.json")
    computed: list[int] = []
    put: list[str] = []
    real, upload = repair_module.compute_shard, Bucket.upload
    monkeypatch.setattr(repair_module, "compute_shard", lambda *g: (computed.append(g[3]), real(*g))[1])
    monkeypatch.setattr(Bucket, "upload", lambda self, name, data: (put.append(name), upload(self, name, data))[1])
    result = run_repair(given)
    assert computed == result["repaired_shards"] == [1, 3, 4]
    assert sorted(result["repaired_files"]) == ["plan.json", "stats.safetensors", "target/tokenizer.json"]
    assert result["ok"] is True
    assert result["fingerprint"] == result["previous_fingerprint"]
    assert objects(url) == before
    assert put[-1] == "manifest.json"
    assert {name.split("/")[1] for name in put if name.startswith("shards/")} == {"00001", "00003", "00004"}
    assert "target/head.safetensors" not in put
    put.clear()
    assert run_repair(RepairConfig(cache=url))["repaired_shards"] == put == []


def test_other_last_bits_change_the_fingerprint_and_name_the_parent(
    given: RepairConfig, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, real = open_cache(url).fingerprint, repair_module.compute_shard

    def another_machine(*arguments: Any) -> Any:
        rows, dropped = real(*arguments)
        for row in rows:
            row.states[1].mul_(1 + 2**-20)
        return rows, dropped

    monkeypatch.setattr(repair_module, "compute_shard", another_machine)
    flip(url, "shards/00001/states/1/c/0/0")
    result = run_repair(given)
    after = open_cache(url)
    assert result["previous_fingerprint"] == before != result["fingerprint"] == after.fingerprint
    assert after.manifest.parents == (before,)
    assert verify(url)["ok"]


def test_a_repair_that_is_interrupted_is_repeated(
    given: RepairConfig, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, real = objects(url), Bucket.upload
    flip(url, "shards/00001/states/1/c/0/0")
    flip(url, "shards/00002/states/1/c/0/0")

    def interrupted(self: Bucket, name: str, content: Path | bytes) -> None:
        if name == "shards/00002/record.json":
            raise KeyboardInterrupt
        real(self, name, content)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "upload", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_repair(given)
    assert run_repair(given)["ok"] is True
    assert objects(url) == before


def test_without_a_corpus_and_beside_another_writer_it_is_refused(
    given: RepairConfig, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(url, "shards/00001/states/1/c/0/0")
    before = objects(url)
    with pytest.raises(ConfigError, match=f"{url}: shard 1 must be computed again.*--corpus chat.jsonl and --target"):
        run_repair(RepairConfig(cache=url))
    assert objects(url) == before
    if url.startswith("file:"):
        return  # has no claims
    monkeypatch.setattr(bucket_repair, "WAIT_SECONDS", 0.1)
    other = Leases(Bucket(url), "other", 600)
    assert other.take(FINISH)
    with pytest.raises(DflashError, match="another process is writing or repairing this cache right now"):
        run_repair(given)
    other.release_all()
    assert objects(url) == before
