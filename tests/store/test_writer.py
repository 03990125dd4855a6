from __future__ import annotations

import dataclasses
import errno
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dflash_pipeline.errors import (
    CacheCorrupt,
    CacheIncomplete,
    CacheMismatch,
    CacheMissing,
    ConfigError,
    DflashError,
    TargetError,
)
from dflash_pipeline.store import Row, open_cache, verify
from dflash_pipeline.store import writer as writer_module
from dflash_pipeline.store.begin import refuse_strangers

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),  # the children only write, and die
]


def test_writing_the_same_rows_twice_gives_the_same_bytes(
    synthetic: ModuleType, pristine: Path, tmp_path: Path
) -> None:
    synthetic.write_cache(tmp_path / "again")
    assert synthetic.content(tmp_path / "again") == synthetic.content(pristine)


def test_the_order_in_which_rows_come_does_not_matter(synthetic: ModuleType, pristine: Path, tmp_path: Path) -> None:
    plan, ordered = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())
    with synthetic.open_writer(tmp_path / "c", plan) as writer:
        for shard in reversed(writer.missing_shards):
            rows = [ordered[index] for index in plan.shard_slice(shard)]
            writer.write_shard(shard, iter(rows[::-1]), {})
        writer.finish()
    assert synthetic.content(tmp_path / "c") == synthetic.content(pristine)


@pytest.mark.parametrize("in_the_middle", [False, True], ids=["between", "inside"])
@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_killed_writer_goes_on_to_the_same_bytes(
    synthetic: ModuleType, pristine: Path, tmp_path: Path, done: int, in_the_middle: bool
) -> None:
    path = tmp_path / "c"
    assert synthetic.in_another_process(partial(synthetic.write_and_die, path, done, in_the_middle=in_the_middle)) == 9
    with pytest.raises(CacheIncomplete, match=f"{done} of 4 shards"):
        open_cache(path)
    left = list((path / "shards").glob(".tmp-*"))
    assert len(left) == in_the_middle
    plan, ordered = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())
    with synthetic.open_writer(path, plan) as writer:  # the dead process' lock does not block
        assert writer.missing_shards == list(range(done, 4))
        assert writer.resumed_rows == sum(plan.shard_rows[:done])
        synthetic.write_missing(writer, ordered)
        writer.finish()
    assert synthetic.content(path) == synthetic.content(pristine)
    assert not list(path.rglob(".tmp-*"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_length", 99), ("attention", "eager"), ("layer_ids", (1, 5)), ("dtype", "float32"), ("template_hash", "x")],
)
def test_other_inputs_on_the_same_folder_are_refused_by_name(
    synthetic: ModuleType, cache: Path, field: str, value: Any
) -> None:
    ident = synthetic.identity(**{field: value})
    plan, _ = synthetic.make_plan(synthetic.make_rows(), ident)
    before = synthetic.content(cache)
    with pytest.raises(CacheMismatch, match=f"{field} is .* use another --out"):
        synthetic.open_writer(cache, plan)
    assert synthetic.content(cache) == before


def test_rows_tokenized_otherwise_are_refused(synthetic: ModuleType, cache: Path) -> None:
    plan, _ = synthetic.make_plan(synthetic.make_rows(seed=1), synthetic.identity())
    with pytest.raises(CacheMismatch, match="rows differ"):
        synthetic.open_writer(cache, plan)


def test_a_moved_and_renamed_target_goes_on(synthetic: ModuleType, cache: Path, tmp_path: Path) -> None:
    moved = tmp_path / "my dir" / "cache"
    moved.parent.mkdir()
    shutil.move(cache, moved)
    plan, _ = synthetic.make_plan(synthetic.make_rows(), synthetic.identity(target_name="elsewhere"))
    with synthetic.open_writer(moved, plan) as writer:
        assert writer.missing_shards == []
        assert writer.finish().fingerprint == open_cache(moved).fingerprint


def test_a_finished_cache_is_left_as_it_is(synthetic: ModuleType, cache: Path) -> None:
    before = synthetic.content(cache)
    plan, _ = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())
    with synthetic.open_writer(cache, plan) as writer:
        assert writer.resumed_rows == 8
        writer.finish()
    assert synthetic.content(cache) == before


def test_a_damaged_finished_cache_is_named_not_extended(synthetic: ModuleType, cache: Path) -> None:
    plan, _ = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())
    file = cache / "shards/00001/states/4/c/0/0"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(CacheCorrupt, match=str(file)):
        synthetic.open_writer(cache, plan)
    file.unlink()
    with pytest.raises(CacheMissing, match=str(file)):
        synthetic.open_writer(cache, plan)
    file.write_bytes(data)
    synthetic.open_writer(cache, plan).close()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a file gone": lambda shard: (shard / "tokens/c/0").unlink(),
    "a file cut": lambda shard: (shard / "tokens/c/0").write_bytes(b""),
    "the record gone": lambda shard: (shard / "record.json").unlink(),
    "the record cut": lambda shard: (shard / "record.json").write_bytes(b"{"),
    "an empty folder": lambda shard: (shutil.rmtree(shard), shard.mkdir()),
}


@pytest.mark.parametrize("name", sorted(DAMAGE))
def test_a_damaged_shard_of_an_unfinished_cache_is_written_again(
    synthetic: ModuleType, cache: Path, pristine: Path, name: str
) -> None:
    (cache / "manifest.json").unlink()
    DAMAGE[name](cache / "shards/00002")
    plan, ordered = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())
    with synthetic.open_writer(cache, plan) as writer:
        assert writer.missing_shards == [2]
        assert list(writer.replaced_shards) == [2]
        synthetic.write_missing(writer, ordered)
        writer.finish()
    assert synthetic.content(cache) == synthetic.content(pristine)


def test_a_record_in_the_wrong_place_is_not_taken(synthetic: ModuleType, cache: Path) -> None:
    (cache / "manifest.json").unlink()
    shutil.rmtree(cache / "shards/00002")
    shutil.copytree(cache / "shards/00001", cache / "shards/00002")
    plan, _ = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())
    with synthetic.open_writer(cache, plan) as writer:
        assert writer.missing_shards == [2]


def test_a_cache_is_not_finished_before_its_last_shard(synthetic: ModuleType, tmp_path: Path) -> None:
    plan, _ = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())
    with synthetic.open_writer(tmp_path / "c", plan) as writer, pytest.raises(CacheIncomplete, match="4 of 4"):
        writer.finish()
    assert not (tmp_path / "c/manifest.json").exists()


def test_an_error_in_the_block_never_completes_a_cache(synthetic: ModuleType, tmp_path: Path) -> None:
    plan, ordered = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())

    def write_and_fail() -> None:
        with synthetic.open_writer(tmp_path / "c", plan) as writer:
            synthetic.write_missing(writer, ordered)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_and_fail()
    with pytest.raises(CacheIncomplete, match="4 of 4 shards"):
        open_cache(tmp_path / "c")


def test_when_every_row_is_dropped_nothing_is_finished(synthetic: ModuleType, tmp_path: Path) -> None:
    rows = synthetic.make_rows()
    with pytest.raises(TargetError, match=r"every one of the 8 rows was dropped \(NaN states\)"):
        synthetic.write_cache(tmp_path / "c", rows, dropped={row.id: "NaN states" for row in rows})
    assert not (tmp_path / "c/manifest.json").exists()


def _replace(**changes: Any) -> Callable[[Row], Row]:
    return lambda row: dataclasses.replace(row, **changes)


WRONG: dict[str, Callable[[Row], Row]] = {
    "another id": _replace(id="stranger"),
    "tokens of another dtype": lambda row: dataclasses.replace(row, tokens=row.tokens.long()),
    "a token too many": lambda row: dataclasses.replace(row, tokens=torch.cat([row.tokens, row.tokens[:1]])),
    "another prompt": lambda row: dataclasses.replace(row, tokens=row.tokens + 1),
    "another mask": lambda row: dataclasses.replace(row, loss_mask=~row.loss_mask),
    "a mask of bytes": lambda row: dataclasses.replace(row, loss_mask=row.loss_mask.byte()),
    "a layer less": lambda row: dataclasses.replace(row, states={1: row.states[1]}),
    "states of another dtype": lambda row: dataclasses.replace(
        row, states={k: v.float() for k, v in row.states.items()}
    ),
    "states of another width": lambda row: dataclasses.replace(
        row, states={k: v[:, :-1] for k, v in row.states.items()}
    ),
    "top ids beyond the vocabulary": lambda row: dataclasses.replace(row, top_ids=row.top_ids + 50),
    "top ids below zero": lambda row: dataclasses.replace(row, top_ids=row.top_ids - 50),
    "fewer top ids": lambda row: dataclasses.replace(row, top_ids=row.top_ids[:, :2]),
    "double log probabilities": lambda row: dataclasses.replace(row, top_logprobs=row.top_logprobs.double()),
    "a final state nobody keeps": lambda row: dataclasses.replace(row, final=row.states[1]),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_row_that_is_not_the_planned_one_is_refused(synthetic: ModuleType, tmp_path: Path, name: str) -> None:
    plan, ordered = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())
    rows = [ordered[index] for index in plan.shard_slice(0)]
    long = max(range(len(rows)), key=lambda place: len(rows[place].tokens))
    with synthetic.open_writer(tmp_path / "c", plan) as writer:
        with pytest.raises(CacheMismatch):
            writer.write_shard(0, [*rows[:long], WRONG[name](rows[long]), *rows[long + 1 :]], {})
        assert list((tmp_path / "c/shards").iterdir()) == []
        writer.write_shard(0, rows, {})


def test_a_missing_or_doubled_row_is_refused(synthetic: ModuleType, tmp_path: Path) -> None:
    plan, ordered = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())
    rows = [ordered[index] for index in plan.shard_slice(0)]
    with synthetic.open_writer(tmp_path / "c", plan) as writer:
        for wrong, dropped in ((rows[1:], {}), ([*rows, rows[0]], {}), (rows, {"NaN": [rows[0].id]})):
            with pytest.raises(CacheMismatch, match="planned rows once"):
                writer.write_shard(0, wrong, dropped)
        writer.write_shard(0, rows, {})
        with pytest.raises(CacheMismatch, match="written already"):
            writer.write_shard(0, rows, {})


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_no_half_shard(
    synthetic: ModuleType, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    plan, ordered = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())
    with monkeypatch.context() as patch, synthetic.open_writer(tmp_path / "c", plan) as writer:
        patch.setattr(writer_module, "write_record", full)
        with pytest.raises(DflashError, match=r"no space left on the disk.*run the same command again"):
            synthetic.write_missing(writer, ordered)
        assert list((tmp_path / "c/shards").iterdir()) == []
    synthetic.write_cache(tmp_path / "c")
    assert synthetic.content(tmp_path / "c") == synthetic.content(pristine)


def test_a_folder_of_other_things_is_not_written_into(synthetic: ModuleType, tmp_path: Path) -> None:
    plan, _ = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())
    (tmp_path / "thesis.tex").write_text("precious", encoding="utf-8")
    with pytest.raises(CacheMismatch, match=r"thesis\.tex"):
        synthetic.open_writer(tmp_path, plan)
    with pytest.raises(CacheMismatch, match="is a file"):
        synthetic.open_writer(tmp_path / "thesis.tex", plan)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_head_of_another_size_is_refused(synthetic: ModuleType, tmp_path: Path) -> None:
    plan, _ = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())
    with pytest.raises(ConfigError, match="does not fit the plan"):
        synthetic.open_writer(tmp_path / "c", plan, hidden=16)


def test_a_failure_while_the_target_is_stored_leaves_nothing_half(
    synthetic: ModuleType, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(directory: Path) -> None:
        (directory / "config.json").write_text("{", encoding="utf-8")
        raise RuntimeError

    plan, _ = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())
    with monkeypatch.context() as patch:
        patch.setattr(synthetic, "target_files", fail)
        with pytest.raises(RuntimeError):
            synthetic.open_writer(tmp_path / "c", plan)
    assert not (tmp_path / "c/target").exists()
    synthetic.write_cache(tmp_path / "c")
    assert synthetic.content(tmp_path / "c") == synthetic.content(pristine)


def test_files_are_readable_by_other_users(cache: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    for path in cache.rglob("*"):
        if path.name != ".lock":
            wanted = (0o777 if path.is_dir() else 0o666) & ~umask
            assert path.stat().st_mode & 0o777 == wanted, path


def test_kills_at_random_moments_never_lose_or_invent_anything(
    synthetic: ModuleType, pristine: Path, tmp_path: Path
) -> None:
    path = tmp_path / "c"
    source = random.Random(0)
    codes = [
        synthetic.in_another_process(synthetic.write_and_die, path, None, kill_after=source.uniform(0.002, 0.08))
        for _ in range(20)
    ]
    assert -9 in codes
    assert synthetic.in_another_process(synthetic.write_and_die, path, None) == 0
    assert synthetic.content(path) == synthetic.content(pristine)
    assert verify(path)["ok"]


def test_a_cache_that_another_writer_begins_meanwhile_is_no_stranger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists = Path.exists

    def begun_after_the_look(path: Path) -> bool:
        there = exists(path)
        if path.name == "plan.json":
            path.touch()
        return there

    monkeypatch.setattr(Path, "exists", begun_after_the_look)
    refuse_strangers(tmp_path)
    assert exists(tmp_path / "plan.json")  # it was begun in between
