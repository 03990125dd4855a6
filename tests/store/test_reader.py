from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_pipeline.errors import CacheCorrupt, CacheMismatch, CacheMissing, ConfigError
from dflash_pipeline.store import CacheReader, Row, codecs, open_cache

READ_ALL = (
    "import sys; sys.modules['ml_dtypes'] = None; sys.modules['zarr'] = None\n"
    "from pathlib import Path\n"
    "from dflash_pipeline.store import open_cache\n"
    "cache = open_cache(Path(sys.argv[1]))\n"
    "rows = [row for shard in range(cache.num_shards) for row in cache.read_shard(shard)]\n"
    "bits = b''.join(row.states[layer].view(__import__('torch').int16).numpy().tobytes()\n"
    "                for row in rows for layer in cache.layer_ids)\n"
    "import hashlib; print(hashlib.sha256(bits).hexdigest())\n"
)


def all_rows(cache: CacheReader, **options: Any) -> list[Row]:
    return [row for shard in range(cache.num_shards) for row in cache.read_shard(shard, **options)]


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=8),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    final=st.booleans(),
    seed=st.integers(0, 50),
    shard_tokens=st.integers(1, 150),
    chunk=st.sampled_from([16, 64, 8192]),
)
def test_every_bit_of_every_row_comes_back(
    synthetic: ModuleType, lengths: list[int], dtype: str, final: bool, seed: int, shard_tokens: int, chunk: int
) -> None:
    rows = synthetic.make_rows(lengths, dtype=dtype, final=final, any_bits=True, seed=seed)
    by_id = {row.id: row for row in rows}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(codecs, "MAX_CHUNK_ITEMS", chunk)
        path = Path(folder) / "cache"
        synthetic.write_cache(path, rows, dtype=dtype, keep_final=final, shard_tokens=shard_tokens)
        cache = open_cache(path)
        found = all_rows(cache, final=final)
        assert [row.id for row in found] == cache.row_ids
        assert sorted(cache.row_ids) == sorted(by_id)
        assert all(synthetic.same_rows(row, by_id[row.id]) for row in found)
        index = seed % len(rows)
        assert synthetic.same_rows(cache.read_row(index, final=final), found[index])


SPECIAL = {
    "bfloat16": [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FA5, 0xFFFF, 0x0001, 0x8001, 0x7F7F],
    "float32": [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FA5A5A5, 0xFFFFFFFF, 1, 0x80000001, 0x7F7FFFFF],
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nan_payloads_infinities_and_the_sign_of_zero_survive(
    synthetic: ModuleType, tmp_path: Path, dtype: str
) -> None:
    kind = torch.int16 if dtype == "bfloat16" else torch.int32
    bits = np.resize(np.asarray(SPECIAL[dtype], np.uint16 if dtype == "bfloat16" else np.uint32), (9, 8))
    (row,) = synthetic.make_rows([9], dtype=dtype)
    states = torch.from_numpy(bits.view(np.int16 if dtype == "bfloat16" else np.int32)).view(synthetic.TORCH[dtype])
    row.states.update({1: states, 4: torch.zeros_like(states)})
    manifest = synthetic.write_cache(tmp_path / "c", [row], dtype=dtype)
    found = open_cache(tmp_path / "c").read_row(0)
    assert torch.equal(found.states[1].view(kind), states.view(kind))
    assert manifest.layers[1].nans > 0
    assert manifest.layers[4].zeros == 72


def test_columns_are_those_of_the_rows(synthetic: ModuleType, pristine: Path) -> None:
    cache = open_cache(pristine)
    plan, ordered = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())
    assert cache.row_ids == [row.id for row in ordered]
    assert cache.num_tokens.tolist() == plan.num_tokens.tolist()
    assert cache.num_prompt_tokens.tolist() == plan.num_prompt_tokens.tolist()
    assert cache.num_anchors.tolist() == plan.num_anchors.tolist()
    assert [f"{value:016x}" for value in cache.prompt_hash.tolist()] == plan.prompt_hash
    assert cache.prompt_hash.dtype == np.uint64
    assert cache.row_shard.tolist() == [shard for shard, count in enumerate(plan.shard_rows) for _ in range(count)]
    assert (cache.num_rows, cache.num_shards, cache.hidden_size, cache.vocab_size, cache.top_k) == (8, 4, 8, 50, 3)
    assert (cache.layer_ids, cache.dtype, cache.identity) == ((1, 4), torch.bfloat16, plan.identity.digest)


def test_rows_come_in_the_order_asked_for(synthetic: ModuleType, pristine: Path) -> None:
    cache = open_cache(pristine)
    shard = int(np.argmax(np.bincount(cache.row_shard)))
    rows = np.flatnonzero(cache.row_shard == shard).tolist()
    whole = dict(zip(rows, cache.read_shard(shard), strict=True))
    for wanted in (rows[::-1], rows[1:], rows[:1], [rows[0], rows[0]], []):
        found = cache.read_shard(shard, rows=wanted)
        assert len(found) == len(wanted)
        assert all(synthetic.same_rows(row, whole[index]) for row, index in zip(found, wanted, strict=True))


def test_only_what_is_asked_for_is_touched(pristine: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(pristine, tmp_path / "c"))
    for name in ("states/1", "top_ids", "top_logprobs", "row_ids", "row_offsets"):
        for shard in (path / "shards").iterdir():
            shutil.rmtree(shard / name)
    rows = all_rows(open_cache(path), layer_ids=[4], top_k=False)
    assert len(rows) == 8
    assert all(list(row.states) == [4] and row.top_ids.shape == (len(row.tokens), 0) for row in rows)
    with pytest.raises(CacheMissing, match="states/1"):
        open_cache(path).read_row(0)


def test_opening_touches_no_shard(pristine: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(pristine, tmp_path / "c"))
    shutil.rmtree(path / "shards")
    cache = open_cache(path)
    assert cache.num_rows == 8
    with pytest.raises(CacheMissing, match="shards/00000"):
        cache.read_shard(0)


def test_dropped_rows_are_not_there(synthetic: ModuleType, tmp_path: Path) -> None:
    rows = synthetic.make_rows()
    plan, ordered = synthetic.make_plan(rows, synthetic.identity())
    whole_shard = [plan.row_ids[index] for index in plan.shard_slice(1)]
    dropped = dict.fromkeys(whole_shard, "all-zero states") | {ordered[0].id: "NaN states"}
    manifest = synthetic.write_cache(tmp_path / "c", rows, dropped)
    cache = open_cache(tmp_path / "c")
    assert cache.row_ids == [row.id for row in ordered if row.id not in dropped]
    assert cache.read_shard(1) == []
    assert manifest.dropped == {"all-zero states": len(whole_shard), "NaN states": 1}
    by_id = {row.id: row for row in rows}
    assert all(synthetic.same_rows(row, by_id[row.id]) for row in all_rows(cache))
    assert all(synthetic.same_rows(cache.read_row(i), by_id[cache.row_ids[i]]) for i in range(cache.num_rows))


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.read_shard(4),
        lambda cache: cache.read_shard(-1),
        lambda cache: cache.read_shard(0, rows=[7]),
        lambda cache: cache.read_row(8),
        lambda cache: cache.read_row(-1),
        lambda cache: cache.read_row(0, layer_ids=[2]),
        lambda cache: cache.read_row(0, final=True),
        lambda cache: cache.channel_rms(2),
        lambda cache: cache.channel_stats(2),
    ],
)
def test_what_is_not_in_the_cache_is_refused(pristine: Path, call: Callable[[CacheReader], object]) -> None:
    with pytest.raises(ConfigError):
        call(open_cache(pristine))


def data_files(path: Path) -> list[str]:
    return sorted(file.relative_to(path).as_posix() for file in (path / "shards/00001").rglob("*") if file.is_file())


def read_everything(path: Path) -> None:
    cache = open_cache(path)
    all_rows(cache)
    cache.head()
    cache.channel_rms(1)


def test_a_deleted_cut_or_changed_file_is_named(cache: Path) -> None:
    read = [
        name for name in data_files(cache) if ("row_" not in name and "/c/" in name) or name.endswith("4/zarr.json")
    ]
    assert len(read) >= 7
    for name in [*read, "target/head.safetensors", "stats.safetensors", "plan.json"]:
        path = cache / name
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(CacheMissing, match=name):
            read_everything(cache)
        for damaged in (data[:-1], data + b"\0", b""):
            path.write_bytes(damaged)
            with pytest.raises(CacheCorrupt, match=name):
                read_everything(cache)
        path.write_bytes(data)
    read_everything(cache)


def test_a_flipped_bit_in_what_is_read_is_named(cache: Path) -> None:
    for name in ("states/1/c/0/0", "states/4/zarr.json", "tokens/c/0", "top_ids/c/0/0", "loss_mask/c/0"):
        path = cache / "shards/00001" / name
        data = path.read_bytes()
        for place in range(0, len(data), max(1, len(data) // 20)):
            changed = bytearray(data)
            changed[place] ^= 16
            path.write_bytes(changed)
            with pytest.raises(CacheCorrupt, match=name):
                open_cache(cache).read_shard(1)
        path.write_bytes(data)


def test_a_file_damaged_after_opening_is_noticed(cache: Path) -> None:
    reader = open_cache(cache)
    reader.read_shard(1)
    path = cache / "shards/00001/states/1/c/0/0"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CacheCorrupt, match="states/1"):
        reader.read_shard(1)
    path.unlink()
    with pytest.raises(CacheMissing, match="states/1"):
        reader.read_shard(1)


def test_shards_swapped_with_equal_sizes_are_noticed(synthetic: ModuleType, tmp_path: Path) -> None:
    synthetic.write_cache(tmp_path / "c", synthetic.make_rows([20, 20, 20, 20]), shard_tokens=20)
    shards = tmp_path / "c/shards"
    (shards / "00000").rename(shards / "x")
    (shards / "00001").rename(shards / "00000")
    (shards / "x").rename(shards / "00001")
    with pytest.raises(CacheCorrupt, match=r"shards/00000/record\.json"):
        all_rows(open_cache(tmp_path / "c"))


def test_a_shard_of_another_cache_is_noticed(synthetic: ModuleType, cache: Path, tmp_path: Path) -> None:
    synthetic.write_cache(tmp_path / "other", synthetic.make_rows(seed=1))
    shutil.rmtree(cache / "shards/00001")
    shutil.copytree(tmp_path / "other/shards/00001", cache / "shards/00001")
    open_cache(cache).read_shard(0)
    with pytest.raises(CacheCorrupt, match=r"shards/00001/record\.json"):
        open_cache(cache).read_shard(1)


def test_a_value_out_of_range_is_refused(cache: Path, synthetic: ModuleType) -> None:
    cache_ = open_cache(cache)
    cache_.vocab_size = 3
    with pytest.raises(CacheCorrupt, match="top_ids"):
        cache_.read_shard(0)


def test_a_pickled_reader_opens_the_same_cache(cache: Path, synthetic: ModuleType, tmp_path: Path) -> None:
    reader = open_cache(cache)
    data = pickle.dumps(reader)
    assert len(data) < 1000
    assert synthetic.same_rows(pickle.loads(data).read_row(3), reader.read_row(3))
    synthetic.write_cache(tmp_path / "other", attention="eager")
    shutil.rmtree(cache)
    shutil.move(tmp_path / "other", cache)
    with pytest.raises(CacheMismatch, match="another cache is there now"):
        pickle.loads(data)


def test_a_fresh_process_reads_the_same_bits_without_ml_dtypes_or_zarr(pristine: Path) -> None:
    import hashlib

    rows = all_rows(open_cache(pristine))
    bits = b"".join(row.states[layer].view(torch.int16).numpy().tobytes() for row in rows for layer in (1, 4))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", READ_ALL, str(pristine)], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == hashlib.sha256(bits).hexdigest()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # the point of this test is a fork with threads
def test_a_forked_worker_reads_after_its_parent_has_read(pristine: Path) -> None:
    reader = open_cache(pristine)
    reader.read_shard(0)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    worker = context.Process(target=lambda: queue.put([row.id for row in reader.read_shard(1)]))
    worker.start()
    worker.join(30)
    assert worker.exitcode == 0
    assert queue.get() == [row.id for row in reader.read_shard(1)]


def test_a_relative_path_to_a_folder_with_a_space_works(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(pristine, tmp_path / "my dir" / "c")
    monkeypatch.chdir(tmp_path / "my dir")
    reader = open_cache("c")
    monkeypatch.chdir("/")
    assert len(all_rows(reader)) == 8


def test_a_read_only_cache_reads_as_another_user(pristine: Path) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        path = Path(shutil.copytree(pristine, folder / "c"))
        folder.chmod(0o755)
        for file in sorted(path.rglob("*"), reverse=True):
            file.chmod(0o555 if file.is_dir() else 0o444)
        path.chmod(0o555)
        before = sorted(path.rglob("*"))
        if os.geteuid() == 0:  # root ignores modes: read as nobody, in a child
            context = multiprocessing.get_context("fork")
            queue = context.SimpleQueue()

            def read_as_nobody() -> None:
                os.setuid(65534)
                read_everything(path)
                queue.put(os.access(path, os.W_OK))

            worker = context.Process(target=read_as_nobody)
            worker.start()
            worker.join(30)
            assert worker.exitcode == 0
            assert queue.get() is False
        else:
            read_everything(path)
        assert sorted(path.rglob("*")) == before
    finally:
        for file in folder.rglob("*"):
            file.chmod(file.stat().st_mode | stat.S_IRWXU)
        shutil.rmtree(folder)


def test_the_target_s_head_config_and_statistics_are_there(synthetic: ModuleType, pristine: Path) -> None:
    cache = open_cache(pristine)
    assert torch.equal(cache.head().embed_tokens, synthetic.make_head().embed_tokens)
    assert cache.target_config() == {"hidden_size": 8}
    assert (cache.target_dir / "tokenizer.json").exists()
    wide = torch.cat([row.states[4] for row in all_rows(cache)]).double()
    torch.testing.assert_close(cache.channel_rms(4), wide.square().mean(0).sqrt().float())
    stats = cache.channel_stats(4)
    assert stats["rms"] == pytest.approx(wide.square().mean().sqrt().item(), rel=1e-9)
    assert (stats["values"], stats["nans"]) == (wide.numel(), 0)
