"""A damaged cache is repaired shard by shard, and nothing else of it changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_pipeline.errors import CacheCorrupt, CacheMismatch, ConfigError, DflashError
from dflash_pipeline.extract import ExtractConfig, run_extract
from dflash_pipeline.extract import repair as repair_module
from dflash_pipeline.extract.repair import RepairConfig, run_repair
from dflash_pipeline.store import Row, open_cache, verify
from dflash_pipeline.store.replace import replacing


@pytest.fixture
def damaged(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "cache"))


@pytest.fixture
def given(damaged: Path, tiny_target_dir: Path, chat_corpus: Path) -> RepairConfig:
    return RepairConfig(cache=damaged, corpus=(chat_corpus,), target=str(tiny_target_dir), device="cpu")


def contents(cache: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(cache)): path.read_bytes()
        for path in sorted(cache.rglob("*"))
        if path.is_file() and not path.relative_to(cache).parts[0].startswith(".")
    }


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 8
    path.write_bytes(data)


def test_just_the_bad_shards_are_computed_again_to_the_same_bytes(
    given: RepairConfig, damaged: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(whole)
    flip(damaged / "shards/00001/states/1/c/0/0")
    (damaged / "shards/00003/tokens/c/0").unlink()
    shutil.rmtree(damaged / "shards/00004")
    untouched = (damaged / "shards/00002/record.json").stat().st_ino
    computed: list[int] = []
    real = repair_module.compute_shard

    def compute_shard(target: Any, plan: Any, rows: Any, shard: int, progress: Any) -> Any:
        computed.append(shard)
        return real(target, plan, rows, shard, progress)

    monkeypatch.setattr(repair_module, "compute_shard", compute_shard)
    result = run_repair(given)
    assert computed == result["repaired_shards"] == [1, 3, 4]
    assert result["ok"] is True
    assert len(result["problems"]) >= 3
    assert result["fingerprint"] == result["previous_fingerprint"]
    assert contents(damaged) == before
    assert (damaged / "shards/00002/record.json").stat().st_ino == untouched


def test_files_outside_the_shards_are_made_again(given: RepairConfig, damaged: Path, whole: Path) -> None:
    flip(damaged / "plan.json")
    flip(damaged / "stats.safetensors")
    flip(damaged / "target/head.safetensors")
    (damaged / "target/tokenizer.json").unlink()
    result = run_repair(given)
    assert result["ok"] is True
    assert result["repaired_shards"] == []
    assert sorted(result["repaired_files"]) == [
        *("plan.json", "stats.safetensors", "target/head.safetensors", "target/tokenizer.json")
    ]
    assert contents(damaged) == contents(whole)


def test_statistics_need_neither_corpus_nor_target(damaged: Path, whole: Path) -> None:
    (damaged / "stats.safetensors").unlink()
    assert run_repair(RepairConfig(cache=damaged))["repaired_files"] == ["stats.safetensors"]
    assert contents(damaged) == contents(whole)


def test_an_intact_cache_needs_nothing_and_is_left_alone(damaged: Path, whole: Path) -> None:
    result = run_repair(RepairConfig(cache=damaged))
    assert (result["ok"], result["repaired_shards"], result["repaired_files"]) == (True, [], [])
    assert contents(damaged) == contents(whole)


def test_other_last_bits_change_the_fingerprint_and_name_the_parent(
    given: RepairConfig, damaged: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_cache(damaged)
    real = repair_module.compute_shard

    def another_machine(*arguments: Any) -> tuple[list[Row], dict[str, list[str]]]:
        rows, dropped = real(*arguments)
        for row in rows:
            row.states[1].mul_(1 + 2**-20)
        return rows, dropped

    monkeypatch.setattr(repair_module, "compute_shard", another_machine)
    flip(damaged / "shards/00001/states/1/c/0/0")
    first = run_repair(given)
    after = open_cache(damaged)
    assert after.identity == before.identity
    assert first["previous_fingerprint"] == before.fingerprint != first["fingerprint"] == after.fingerprint
    assert after.manifest.parents == (before.fingerprint,)
    assert verify(damaged)["ok"]
    row = int(after.row_shard.tolist().index(1))
    assert not torch.equal(after.read_row(row).states[1], open_cache(whole).read_row(row).states[1])
    flip(damaged / "shards/00002/states/1/c/0/0")
    run_repair(given)
    assert open_cache(damaged).manifest.parents == (before.fingerprint, after.fingerprint)


def test_without_corpus_or_target_it_says_which_it_lacks(given: RepairConfig, damaged: Path) -> None:
    flip(damaged / "shards/00001/states/1/c/0/0")
    before = contents(damaged)
    with pytest.raises(ConfigError, match=r"shard 1 must be computed again.*--corpus chat\.jsonl and --target"):
        run_repair(RepairConfig(cache=damaged))
    with pytest.raises(ConfigError, match=r"give --target"):
        run_repair(RepairConfig(cache=damaged, corpus=given.corpus))
    with pytest.raises(ConfigError, match=r"give --corpus chat\.jsonl, wherever"):
        run_repair(RepairConfig(cache=damaged, target=given.target))
    assert contents(damaged) == before


def test_another_corpus_or_target_is_refused_by_name(
    given: RepairConfig, damaged: Path, tmp_path: Path, tiny_target_dir: Path
) -> None:
    flip(damaged / "shards/00001/states/1/c/0/0")
    before = contents(damaged)
    lines = given.corpus[0].read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "chat.jsonl").write_text("".join(lines[::-1]), encoding="utf-8")
    with pytest.raises(CacheMismatch, match="corpus is not that of the cache"):
        run_repair(RepairConfig(cache=damaged, corpus=(tmp_path / "chat.jsonl",), target=given.target, device="cpu"))
    other = Path(shutil.copytree(tiny_target_dir, tmp_path / "other"))
    from safetensors.torch import load_file, save_file

    weights = load_file(other / "model.safetensors")
    weights["model.layers.3.mlp.up_proj.weight"][0, 0] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CacheMismatch, match="target_fingerprint is not that of the cache"):
        run_repair(RepairConfig(cache=damaged, corpus=given.corpus, target=str(other), device="cpu"))
    assert contents(damaged) == before


@pytest.mark.parametrize("moment", ["compute_shard", "replace_manifest"])
def test_a_repair_that_is_interrupted_is_repeated(
    given: RepairConfig, damaged: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted before its second shard, or with new shards in place beside the old manifest."""
    for shard in (1, 2):
        flip(damaged / f"shards/0000{shard}/states/1/c/0/0")
    real, calls = getattr(repair_module, moment), []

    def interrupted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == (2 if moment == "compute_shard" else 1):
            raise KeyboardInterrupt
        rows, dropped = real(*arguments)
        for row in rows:
            row.states[1].mul_(1 + 2**-20)
        return rows, dropped

    with monkeypatch.context() as patch:
        patch.setattr(repair_module, moment, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_repair(given)
    if moment == "compute_shard":  # its first shard has other bits than the manifest says: nobody reads them
        with pytest.raises(CacheCorrupt, match=r"shards/00001/record\.json: not the record in the manifest"):
            open_cache(damaged).read_shard(1)
        assert verify(damaged)["bad_shards"] == [1, 2]
    assert run_repair(given)["ok"] is True
    assert not open_cache(damaged).manifest.parents  # all is as it was


def test_two_repairs_at_once_are_refused(given: RepairConfig, damaged: Path) -> None:
    flip(damaged / "shards/00001/states/1/c/0/0")
    with replacing(damaged), pytest.raises(DflashError, match="another process is writing this cache"):
        run_repair(given)


def test_a_damaged_manifest_says_what_builds_it_again(
    given: RepairConfig, damaged: Path, whole: Path, settings: Callable[..., ExtractConfig]
) -> None:
    flip(damaged / "manifest.json")
    with pytest.raises(CacheCorrupt, match="delete it and run the same `dflash extract` again: shards stay"):
        run_repair(given)
    (damaged / "manifest.json").unlink()
    result = run_extract(settings(shard_tokens=400, out=damaged))
    assert result["resumed_rows"] == result["rows"]
    assert contents(damaged) == contents(whole)
