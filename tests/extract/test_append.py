"""A finished cache is extended on purpose: its own shards stay, and until the end the old cache is the one there is."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_pipeline.errors import CacheIncomplete, CacheMismatch, CacheMissing
from dflash_pipeline.extract import ExtractConfig, estimate, run_extract
from dflash_pipeline.extract import repair as repair_module
from dflash_pipeline.extract.repair import RepairConfig, run_repair
from dflash_pipeline.store import CacheWriter, open_cache, verify
from dflash_pipeline.store import writer as writer_module
from dflash_pipeline.store.manifest import read_manifest

Settings = Callable[..., ExtractConfig]


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushing cannot be observed without a power cut, and takes most of the time of these tests."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, chat_corpus: Path) -> dict[str, Path]:
    """The chat corpus in three files; the rows of the last have no ids, and its name is that of the first."""
    folder = tmp_path_factory.mktemp("parts")
    rows = [json.loads(line) for line in chat_corpus.read_text().splitlines()]
    parts = {"old": rows[:14], "new": rows[14:26], "more": [{"messages": row["messages"]} for row in rows[26:]]}
    paths = {}
    for name, part in parts.items():
        (folder / name).mkdir()
        paths[name] = folder / name / ("new.jsonl" if name == "new" else "rows.jsonl")
        paths[name].write_text("".join(json.dumps(row) + "\n" for row in part))
    return paths


def content(cache: Path) -> dict[str, bytes]:
    found = [path for path in cache.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(cache).as_posix(): path.read_bytes() for path in found}


def interrupt_at(shard: int, monkeypatch: pytest.MonkeyPatch, config: ExtractConfig) -> None:
    """Stop an extraction before it writes a shard."""
    real = CacheWriter.write_shard

    def write(self: CacheWriter, number: int, *arguments: Any) -> None:
        if number == shard:
            raise KeyboardInterrupt
        real(self, number, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(CacheWriter, "write_shard", write)
        with pytest.raises(KeyboardInterrupt):
            run_extract(config)


def test_a_cache_grows_part_by_part_and_keeps_what_it_has(settings: Settings, files: dict[str, Path]) -> None:
    config = settings(corpus=(files["old"],), shard_tokens=400)
    first = run_extract(config)
    before = content(config.out)
    ids = open_cache(config.out).row_ids
    second = run_extract(settings(corpus=(files["new"],), shard_tokens=400, append=True))
    third = run_extract(settings(corpus=(files["more"],), shard_tokens=400, append=True))
    assert [result["rows"] for result in (first, second, third)] == [14, 26, 37]
    assert [result["resumed_rows"] for result in (first, second, third)] == [0, 14, 26]
    assert len({result["fingerprint"] for result in (first, second, third)}) == 3
    assert len({result["identity"] for result in (first, second, third)}) == 3
    after = content(config.out)
    assert {name: data for name, data in after.items() if name in before and name != "manifest.json"} == {
        name: data for name, data in before.items() if name != "manifest.json"
    }
    cache = open_cache(config.out)
    assert cache.row_ids[:14] == ids
    assert sorted(cache.row_ids[26:]) == sorted(f"rows-2:{line}" for line in range(1, 12))
    assert [file.name for file in cache.manifest.identity.corpus] == ["rows.jsonl", "new.jsonl", "rows.jsonl"]
    assert cache.manifest.identity.appended == (1, 1)
    assert verify(config.out)["ok"]
    assert abs(third["estimated_bytes"] - sum(map(len, after.values()))) < 0.1 * third["estimated_bytes"]


def test_the_states_of_new_rows_are_those_of_a_cache_of_them_alone(
    settings: Settings, files: dict[str, Path], tmp_path: Path
) -> None:
    config = settings(corpus=(files["old"],))
    run_extract(config)
    run_extract(settings(corpus=(files["new"],), append=True))
    alone = settings(corpus=(files["new"],), out=tmp_path / "alone")
    run_extract(alone)
    extended, new = open_cache(config.out), open_cache(alone.out)
    assert extended.row_ids[14:] == new.row_ids
    for index in range(new.num_rows):
        ours, theirs = extended.read_row(14 + index), new.read_row(index)
        assert torch.equal(ours.tokens, theirs.tokens)
        for layer in new.layer_ids:
            assert torch.equal(ours.states[layer], theirs.states[layer])
    both = torch.stack([extended.channel_rms(layer) for layer in extended.layer_ids])
    rows = [extended.read_row(index) for index in range(extended.num_rows)]
    dense = torch.stack(
        [torch.cat([row.states[layer] for row in rows]).pow(2).mean(0).sqrt() for layer in extended.layer_ids]
    )
    assert torch.allclose(both, dense, rtol=1e-5)


def test_an_interrupted_extension_leaves_the_old_cache_and_goes_on(
    settings: Settings, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = settings(corpus=(files["old"],), shard_tokens=400, out=tmp_path / "whole")
    first = run_extract(whole)
    shutil.copytree(whole.out, tmp_path / "cache")
    num_shards = open_cache(whole.out).num_shards
    append = {"corpus": (files["new"],), "shard_tokens": 400, "append": True}
    expected = run_extract(settings(**append, out=whole.out))
    config = settings(**append)
    interrupt_at(num_shards + 1, monkeypatch, config)
    assert open_cache(config.out).fingerprint == first["fingerprint"]
    assert verify(config.out)["ok"]
    with pytest.raises(CacheMismatch, match=r"corpus is .*finish .* by new.jsonl .*delete .*plan-1.json"):
        run_extract(settings(**{**append, "corpus": (files["more"],)}))
    again = run_extract(settings(corpus=(files["old"],), shard_tokens=400))  # the old command still finds its cache
    assert (again["resumed_rows"], again["fingerprint"]) == (14, first["fingerprint"])
    result = run_extract(config)
    assert 14 < result["resumed_rows"] < 26
    assert result["fingerprint"] == expected["fingerprint"]
    assert content(config.out) == content(whole.out)


def test_an_extension_that_was_given_up_leaves_no_shard_to_the_next(
    settings: Settings, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(corpus=(files["old"],), shard_tokens=400)
    run_extract(config)
    num_shards = open_cache(config.out).num_shards
    interrupt_at(num_shards + 2, monkeypatch, settings(corpus=(files["new"],), shard_tokens=400, append=True))
    (config.out / "plan-1.json").unlink()
    result = run_extract(settings(corpus=(files["more"],), shard_tokens=400, append=True))
    assert (result["resumed_rows"], result["rows"]) == (14, 25)
    assert verify(config.out)["ok"]
    assert len(list((config.out / "shards").iterdir())) == open_cache(config.out).num_shards


def test_the_same_extension_again_changes_nothing_and_needs_no_space(
    settings: Settings, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_extract(settings(corpus=(files["old"],)))
    append = settings(corpus=(files["more"],), append=True)  # its rows are named by file and line
    first = run_extract(append)
    before = content(append.out)
    monkeypatch.setattr(estimate, "free_bytes", lambda _: 0)
    again = run_extract(append)
    assert (again["resumed_rows"], again["fingerprint"]) == (25, first["fingerprint"])
    assert again["estimated_bytes"] == read_manifest(append.out).num_bytes
    assert content(append.out) == before


def test_other_settings_other_files_and_known_rows_are_refused(
    settings: Settings, files: dict[str, Path], tmp_path: Path, tiny_target_dir: Path
) -> None:
    config = settings(corpus=(files["old"],))
    run_extract(config)
    before = content(config.out)
    new = (files["new"],)
    edited = tmp_path / "edited"
    shutil.copytree(tiny_target_dir, edited)
    (edited / "chat_template.jinja").write_text((edited / "chat_template.jinja").read_text() + "{# edited #}")
    copied = tmp_path / "copied.jsonl"
    copied.write_text(files["old"].read_text() + "\n")
    for changes, message in (
        ({"max_length": 100}, r"max_length is None there, 100 now|max_length is 4096 there, 100 now"),
        ({"top_k": 4}, "top_k is 8 there, 4 now"),
        ({"dtype": "bfloat16"}, "dtype is float32 there, bfloat16 now"),
        ({"layers": "1,2"}, "layer_ids"),
        ({"batch_tokens": 400}, "batch_tokens is 500 there, 400 now"),
        ({"limit_rows": 3}, "limit_rows is not given there, 3 now"),
        ({"target": str(edited)}, "template_hash"),
        ({"corpus": (files["old"],)}, "rows.jsonl is in it already, as rows.jsonl"),
        ({"corpus": (copied,)}, "has a row 'row-0-[0-9]+' already"),
    ):
        with pytest.raises(CacheMismatch, match=message) as caught:
            run_extract(settings(**{"corpus": new, "append": True, **changes}))
        assert "\n" not in str(caught.value)
    with pytest.raises(CacheMismatch, match="--append extends a finished cache"):
        run_extract(settings(corpus=(files["old"], files["new"])))
    assert content(config.out) == before
    run_extract(settings(corpus=new, append=True))
    for corpus in ((files["old"],), (files["old"], files["new"])):
        with pytest.raises(CacheMismatch, match=r"corpus is|appended is \[1\] there, not given now"):
            run_extract(settings(corpus=corpus))


def test_there_must_be_a_finished_cache(
    settings: Settings, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    append = settings(corpus=(files["new"],), append=True)
    with pytest.raises(CacheMissing, match="no cache here"):
        run_extract(append)
    assert not append.out.exists()
    interrupt_at(1, monkeypatch, settings(corpus=(files["old"],), shard_tokens=400))
    with pytest.raises(CacheIncomplete, match=r"1 of [0-9]+ shards"):
        run_extract(append)


def test_a_dry_run_of_an_extension_estimates_the_whole_and_writes_nothing(
    settings: Settings, files: dict[str, Path]
) -> None:
    config = settings(corpus=(files["old"],))
    run_extract(config)
    before = content(config.out)
    result = run_extract(settings(corpus=(files["new"],), append=True, dry_run=True))
    assert result["rows"] == 12
    assert content(config.out) == before
    run_extract(settings(corpus=(files["new"],), append=True))
    real = sum(map(len, content(config.out).values()))
    assert abs(result["estimated_bytes"] - real) < 0.1 * real


def test_an_extended_cache_is_repaired_from_all_its_files(settings: Settings, files: dict[str, Path]) -> None:
    config = settings(corpus=(files["old"],), shard_tokens=400)
    run_extract(config)
    for name in ("new", "more"):
        result = run_extract(settings(corpus=(files[name],), shard_tokens=400, append=True))
    before = content(config.out)
    shards = open_cache(config.out).num_shards
    for shard in (0, shards - 1):
        (config.out / f"shards/{shard:05d}/states/3/c/0/0").unlink()
    (config.out / "plan-2.json").unlink()
    (config.out / "stats-2.safetensors").write_bytes(b"")
    corpus = tuple(files.values())
    with pytest.raises(CacheMismatch, match="corpus is not that of the cache"):
        run_repair(RepairConfig(cache=config.out, corpus=corpus[:2], target=config.target, device="cpu"))
    repaired = run_repair(RepairConfig(cache=config.out, corpus=corpus, target=config.target, device="cpu"))
    assert repaired["repaired_shards"] == [0, shards - 1]
    assert repaired["fingerprint"] == result["fingerprint"]
    assert content(config.out) == before


@pytest.mark.parametrize("bits", ["same", "other"])
def test_a_repair_beside_an_extension_clears_nothing_that_is_being_written(
    bits: str, settings: Settings, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repair comes while a new shard lies half written beside its place, and a killed writer's elsewhere."""
    config = settings(corpus=(files["old"],), shard_tokens=400)
    first = run_extract(config)
    num_shards = open_cache(config.out).num_shards
    append = settings(corpus=(files["new"],), shard_tokens=400, append=True)
    damaged, stale = config.out / "shards/00000/states/3/c/0/0", config.out / f"shards/.tmp-{num_shards + 1:05d}-dead"
    repairs: list[dict[str, Any]] = []
    real_compute, real_write = repair_module.compute_shard, writer_module.write_shard_files

    def compute_shard(*arguments: Any) -> Any:
        rows, dropped = real_compute(*arguments)
        for row in rows:
            row.states[3].mul_(1 + 2**-20 if bits == "other" else 1)
        return rows, dropped

    def write_shard_files(temporary: Path, *arguments: Any) -> Any:
        record = real_write(temporary, *arguments)
        if not repairs:
            damaged.unlink()
            stale.mkdir()
            given = RepairConfig(cache=config.out, corpus=config.corpus, target=config.target, device="cpu")
            repairs.append(run_repair(given))
            assert temporary.is_dir()
            assert not stale.exists()
        return record

    monkeypatch.setattr(repair_module, "compute_shard", compute_shard)
    monkeypatch.setattr(writer_module, "write_shard_files", write_shard_files)
    run_extract(append)
    assert (repairs[0]["ok"], repairs[0]["repaired_shards"]) == (True, [0])
    assert verify(config.out)["ok"]
    manifest = read_manifest(config.out)
    assert manifest.num_rows == 26
    assert manifest.parents == ((first["fingerprint"],) if bits == "other" else ())


def test_a_repair_of_a_cache_that_was_extended_meanwhile_starts_again(
    settings: Settings, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old manifest written over the new one would lose the extension."""
    config = settings(corpus=(files["old"],), shard_tokens=400)
    run_extract(config)
    stats = config.out / "stats.safetensors"
    whole = stats.read_bytes()
    stats.unlink()

    def verify_slowly(*arguments: Any, **options: Any) -> Any:
        found = verify(*arguments, **options)
        run_extract(settings(corpus=(files["new"],), shard_tokens=400, append=True))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(repair_module, "verify", verify_slowly)
        with pytest.raises(CacheMismatch, match="another process has changed this cache meanwhile"):
            run_repair(RepairConfig(cache=config.out))
    stats.write_bytes(whole)
    assert run_repair(RepairConfig(cache=config.out))["repaired_files"] == []
    assert open_cache(config.out).num_rows == 26
