from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from dflash_pipeline.errors import CacheCorrupt, CacheIncomplete, ConfigError
from dflash_pipeline.store import describe, verify


def test_an_intact_cache_verifies(pristine: Path) -> None:
    found = verify(pristine)
    assert found["ok"]
    assert found["bad_shards"] == []
    assert found["problems"] == []
    assert found["files"] > 40


def test_every_file_of_a_cache_is_covered(cache: Path) -> None:
    files = [
        path for path in sorted(cache.rglob("*")) if path.is_file() and path.name not in (".lock", "manifest.json")
    ]
    for path in files:
        data = path.read_bytes()
        changed = bytearray(data)
        changed[len(data) // 2] ^= 1
        path.write_bytes(changed)
        found = verify(cache)
        inside = path.relative_to(cache).parts
        assert not found["ok"], path
        assert found["bad_shards"] == ([int(inside[1])] if inside[0] == "shards" else [])
        assert found["bad_files"] == ([] if inside[0] == "shards" else ["/".join(inside)])
        assert len(found["problems"]) == 1
        assert str(path) in found["problems"][0]
        path.write_bytes(data)
    assert verify(cache)["ok"]


def test_missing_files_are_listed_shard_by_shard(cache: Path) -> None:
    (cache / "shards/00002/tokens/c/0").unlink()
    (cache / "shards/00000/states/1/c/0/0").unlink()
    found = verify(cache)
    assert found["bad_shards"] == [0, 2]
    assert all("missing" in problem for problem in found["problems"])


def test_an_unfinished_cache_is_not_verified(cache: Path) -> None:
    (cache / "manifest.json").unlink()
    with pytest.raises(CacheIncomplete, match="4 of 4 shards"):
        verify(cache)


def test_a_description_is_the_manifest_without_its_tables(synthetic: ModuleType, pristine: Path) -> None:
    found = describe(pristine)
    assert (found["rows"], found["tokens"], found["shards"]) == (8, sum(synthetic.LENGTHS), 4)
    assert found["skipped"] == {"reply too short": 2}
    assert found["raw_state_bytes"] == 2 * 2 * 8 * sum(synthetic.LENGTHS)
    assert 0 < found["state_bytes"] < found["bytes"]
    assert found["inputs"]["layer_ids"] == [1, 4]
    json.dumps(found)
    assert found["ratio"] == found["state_bytes"] / found["raw_state_bytes"]
    assert found["bits_per_value"] == pytest.approx(16 * found["ratio"])


def test_any_number_of_threads_finds_the_same_and_reports_every_byte(cache: Path) -> None:
    for name in ("shards/00002/tokens/c/0", "shards/00000/record.json", "target/config.json"):
        (cache / name).write_bytes(b"{}")
    reported: list[int] = []

    @contextmanager
    def bar(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        reported.append(-total_bytes)
        yield reported.append

    one, four = verify(cache, num_workers=1), verify(cache, num_workers=4, bar=bar)
    assert one == four
    assert (one["bad_shards"], one["bad_files"]) == ([0, 2], ["target/config.json"])
    assert sum(reported) == 0
    assert -reported[0] == one["bytes"]
    with pytest.raises(ConfigError, match="num_workers 0"):
        verify(cache, num_workers=0)


def test_a_manifest_that_lies_is_not_called_intact(
    cache: Path, reseal: Callable[[Path, Callable[[dict[str, object]], object]], None]
) -> None:
    reseal(cache / "manifest.json", lambda manifest: manifest.update(tokens=1))
    with pytest.raises(CacheCorrupt, match="tokens"):
        verify(cache)
