from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_pipeline.errors import CacheCorrupt, CacheIncomplete, CacheMissing, ConfigError
from dflash_pipeline.store import open_cache
from dflash_pipeline.store.manifest import read_manifest, write_manifest

Mutation = Callable[[dict[str, Any]], object]
Reseal = Callable[[Path, Mutation], None]


def first_file(manifest: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = manifest["shards"][0]["files"]["tokens/c/0"]
    return entry


def rename_file(manifest: dict[str, Any], name: str) -> None:
    files = manifest["shards"][0]["files"]
    files[name] = files.pop("tokens/c/0")


HOSTILE: dict[str, Mutation] = {
    "a path out of the cache": lambda m: rename_file(m, "../../../etc/passwd"),
    "an absolute path": lambda m: rename_file(m, "/etc/passwd"),
    "a path with a backslash": lambda m: rename_file(m, "..\\x"),
    "an outside path among the cache's files": lambda m: m["files"].update({"../x": {"bytes": 1, "xxh3": "0" * 32}}),
    "a size that is a float": lambda m: first_file(m).update(bytes=1.0),
    "a size below zero": lambda m: first_file(m).update(bytes=-1),
    "a size that is a string": lambda m: first_file(m).update(bytes="1"),
    "a digest that is none": lambda m: first_file(m).update(xxh3="xyz"),
    "an unknown field of a file": lambda m: first_file(m).update(mode=7),
    "an unknown field": lambda m: m.update(extra=1),
    "an unknown field of a shard": lambda m: m["shards"][0].update(extra=1),
    "no shards": lambda m: m.update(shards=[]),
    "shards that are an object": lambda m: m.update(shards={}),
    "a missing shard": lambda m: m["shards"].pop(),
    "shards in another order": lambda m: m["shards"].reverse(),
    "more rows than the plan has": lambda m: m["shards"][0].update(rows=99),
    "more tokens than the plan has": lambda m: m["shards"][0].update(tokens=10**12),
    "rows that are a boolean": lambda m: m["shards"][0].update(rows=True),
    "a dropped row that is also stored": lambda m: m["shards"][0]["dropped"].update(odd=["row-0-0-é"]),
    "dropped rows that are numbers": lambda m: m["shards"][0]["dropped"].update(odd=[1]),
    "totals that do not add up": lambda m: m.update(tokens=1),
    "another identity digest": lambda m: m.update(identity_digest="0" * 32),
    "another fingerprint": lambda m: m.update(fingerprint="0" * 32),
    "another identity": lambda m: m["identity"].update(attention="eager"),
    "an identity without layers": lambda m: m["identity"].update(layer_ids=[]),
    "another hidden size": lambda m: m.update(hidden_size=16),
    "a hidden size beyond all bounds": lambda m: m.update(hidden_size=2**60),
    "a vocabulary beyond all bounds": lambda m: m.update(vocab_size=2**60),
    "statistics of another layer": lambda m: m["layers"].update({"7": m["layers"].pop("1")}),
    "more zeros than values": lambda m: m["shards"][0]["layers"]["1"].update(zeros=10**9),
    "an RMS below zero": lambda m: m["shards"][0]["layers"]["1"].update(rms=-1.0),
    "a mean that is text": lambda m: m["shards"][0]["layers"]["1"].update(mean="0"),
    "no record of the plan": lambda m: m["files"].pop("plan.json"),
    "no record of the statistics": lambda m: m["files"].pop("stats.safetensors"),
    "another digest of the plan": lambda m: m["files"]["plan.json"].update(xxh3="0" * 32),
    "another size of the plan": lambda m: m["files"]["plan.json"].update(bytes=5),
    "versions that are numbers": lambda m: m["versions"].update(torch=2),
    "an identity that is null": lambda m: m.update(identity=None),
    "files that are a list": lambda m: m.update(files=[]),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_manifest_is_refused(cache: Path, reseal: Reseal, name: str) -> None:
    reseal(cache / "manifest.json", HOSTILE[name])
    with pytest.raises(CacheCorrupt, match=r"\.json"):
        open_cache(cache)


def test_a_changed_byte_in_the_manifest_is_noticed(cache: Path) -> None:
    path = cache / "manifest.json"
    data = path.read_bytes()
    for place in range(0, len(data) - 1, 61):
        changed = bytearray(data)
        changed[place] ^= 4
        path.write_bytes(changed)
        with pytest.raises((CacheCorrupt, ConfigError), match=r"manifest\.json"):
            read_manifest(cache)


@pytest.mark.parametrize("cut", [0, 1, 500, -2])
def test_a_cut_manifest_is_refused(cache: Path, cut: int) -> None:
    path = cache / "manifest.json"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CacheCorrupt, match=r"manifest\.json"):
        open_cache(cache)


def test_the_manifest_of_another_cache_is_refused(cache: Path, pristine: Path, synthetic: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    synthetic.write_cache(other, attention="eager")
    shutil.copy(other / "manifest.json", cache / "manifest.json")
    with pytest.raises(CacheCorrupt, match=r"plan\.json"):
        open_cache(cache)


@pytest.mark.parametrize("version", [2, "1", None])
def test_another_format_says_what_to_do(cache: Path, reseal: Reseal, version: object) -> None:
    reseal(cache / "manifest.json", lambda manifest: manifest.update(format=version))
    with pytest.raises(ConfigError, match="reads format 1"):
        open_cache(cache)


def test_a_codec_from_the_future_is_refused_with_the_list(cache: Path, synthetic: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'q4' is not one of: lossless"):
        synthetic.write_cache(tmp_path / "new", codec="q4")
    assert not (tmp_path / "new").exists()


def test_a_cache_without_a_manifest_says_how_complete_it_is(cache: Path) -> None:
    (cache / "manifest.json").unlink()
    shutil.rmtree(cache / "shards" / "00001")
    with pytest.raises(CacheIncomplete, match=r"3 of 4 shards .* run the same `dflash extract` again"):
        open_cache(cache)


def test_a_folder_that_is_no_cache_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(CacheMissing, match="dflash extract --out"):
        open_cache(tmp_path / "nothing")
    with pytest.raises(CacheMissing, match="dflash extract --out"):
        open_cache(tmp_path)


def test_a_manifest_without_its_plan_is_refused(cache: Path) -> None:
    (cache / "plan.json").unlink()
    with pytest.raises(CacheMissing, match=r"plan\.json: missing"):
        open_cache(cache)


def test_a_manifest_round_trips(cache: Path) -> None:
    path = cache / "manifest.json"
    before = path.read_bytes()
    manifest = read_manifest(cache)
    path.unlink()
    write_manifest(cache, manifest)
    assert path.read_bytes() == before
    assert json.loads(before)["format"] == 1
