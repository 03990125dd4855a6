"""A corpus of hostile caches. Each is what a stranger may send; each is refused, unread, in bounded memory.

Files that change are entered into a manifest that is sealed again, as a hostile author would.
"""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numcodecs import blosc
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file

from dflash_pipeline.errors import CacheCorrupt, CacheMissing, DflashError
from dflash_pipeline.store import open_cache, verify
from dflash_pipeline.store.decode import MAX_RATIO
from dflash_pipeline.store.jsonfile import digest_bytes, seal
from dflash_pipeline.store.stats import ChannelSums, sums_bytes

PEAK_BYTES = 32 * 2**20
SHARD = "shards/00001"


def load(path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(path.read_bytes())
    del fields["digest"]
    return fields


def vouch(cache: Path, *names: str) -> None:
    """Enter files as they are now into record and manifest, and seal both."""
    manifest = load(cache / "manifest.json")
    for name in names:
        data = (cache / name).read_bytes()
        entry = {"bytes": len(data), "xxh3": digest_bytes(data)}
        if name.startswith("shards/"):
            shard = name.split("/")[1]
            record = load(cache / "shards" / shard / "record.json")
            record["files"][name.split("/", 2)[2]] = entry
            (cache / "shards" / shard / "record.json").write_bytes(seal(record))
            manifest["shards"][int(shard)] = {key: value for key, value in record.items() if key != "format"}
        else:
            manifest["files"][name] = entry
    shards = [[shard[key] for key in ("shard", "rows", "tokens", "dropped", "files")] for shard in manifest["shards"]]
    manifest["fingerprint"] = digest_bytes(
        json.dumps(
            [1, manifest["identity_digest"], shards], sort_keys=True, separators=(",", ":"), ensure_ascii=False
        ).encode()
    )
    manifest["state_bytes"] = sum(
        file["bytes"] for shard in manifest["shards"] for name, file in shard["files"].items() if name[:7] == "states/"
    )
    (cache / "manifest.json").write_bytes(seal(manifest))


def read_everything(cache: Path) -> None:
    reader = open_cache(cache)
    reader.head()
    reader.target_config()
    assert reader.target_dir.is_dir()
    for layer in reader.layer_ids:
        reader.channel_rms(layer)
    for shard in range(reader.num_shards):
        reader.read_shard(shard)


def link(path: Path, to: Path | str) -> None:
    """Put a symbolic link in a path's place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(to)


def link_out(name: str) -> Callable[[Path], None]:
    """Move a file or folder out of the cache, and leave a link: the content is right, the place is not."""

    def build(cache: Path) -> None:
        outside = cache.parent / "outside"
        shutil.move(cache / name, outside)
        (cache / name).symlink_to(outside if "/" in name else f"../{outside.name}")

    return build


def pipe(name: str) -> Callable[[Path], None]:
    """A pipe in a file's place: whoever opens it waits for ever."""

    def build(cache: Path) -> None:
        (cache / name).unlink()
        os.mkfifo(cache / name)

    return build


def sparse(name: str, num_bytes: int) -> Callable[[Path], None]:
    """A file of holes, that takes no space in an archive."""

    def build(cache: Path) -> None:
        os.truncate(cache / name, num_bytes)

    return build


def blown_up(cache: Path, num_tokens: int) -> None:
    """Plan, record, manifest and metadata agree on a row of so many tokens; the data files are small."""
    plan = load(cache / "plan.json")
    first = sum(plan["shard_rows"][:1])
    reader = open_cache(cache)
    before, rows = plan["num_tokens"][first], plan["shard_rows"][1]
    plan["num_tokens"][first] = num_tokens
    (cache / "plan.json").write_bytes(seal(plan))
    record = load(cache / SHARD / "record.json")
    record["tokens"] += num_tokens - before
    for stats in record["layers"].values():
        stats["values"] = record["tokens"] * 8
    items = {name: min(8192, record["tokens"]) for name in ("tokens", "loss_mask", "states/1", "states/4", "top_ids")}
    for name, chunk in items.items():
        path = cache / SHARD / name / "zarr.json"
        metadata = json.loads(path.read_bytes())
        metadata["shape"][0] = record["tokens"]
        metadata["codecs"][0]["configuration"]["chunk_shape"][0] = chunk
        for codec in metadata["codecs"][0]["configuration"]["codecs"]:
            if codec["name"] == "blosc":
                width = {"tokens": 4, "loss_mask": 1, "top_ids": 12}.get(name, 16)
                codec["configuration"]["blocksize"] = chunk * width
        path.write_text(json.dumps(metadata), encoding="utf-8")
    (cache / SHARD / "record.json").write_bytes(seal(record))
    manifest = load(cache / "manifest.json")
    manifest["tokens"] += num_tokens - before
    manifest["raw_state_bytes"] = manifest["tokens"] * 8 * 2 * 2
    for layer, stats in manifest["layers"].items():
        stats.update(_merged([load(cache / f"shards/0000{shard}/record.json")["layers"][layer] for shard in range(4)]))
    manifest["shards"][1] = {key: value for key, value in record.items() if key != "format"}
    (cache / "manifest.json").write_bytes(seal(manifest))
    assert rows >= 1
    assert reader.num_shards == 4
    vouch(cache, "plan.json", *(f"{SHARD}/{name}/zarr.json" for name in items))


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    from dflash_pipeline.store.record import LayerStats, merge_stats

    return vars(merge_stats([LayerStats(**part) for part in parts]))


def nan_statistics(value: float, *, squares: bool) -> Callable[[Path], None]:
    def build(cache: Path) -> None:
        good, bad = np.ones(8), np.ones(8)
        bad[3] = value
        sums = {layer: ChannelSums(good if squares else bad, bad if squares else good) for layer in (1, 4)}
        (cache / "stats.safetensors").write_bytes(sums_bytes(sums))
        vouch(cache, "stats.safetensors")

    return build


def head(**tensors: torch.Tensor) -> Callable[[Path], None]:
    def build(cache: Path) -> None:
        good = {"embed_tokens": torch.ones(50, 8), "norm": torch.ones(8)}
        save_file({**good, **tensors}, cache / "target/head.safetensors", metadata={"norm_eps": "1e-6"})
        vouch(cache, "target/head.safetensors")

    return build


def lying_head(cache: Path) -> None:
    """A safetensors header that promises more than the file has."""
    header = json.dumps({"embed_tokens": {"dtype": "F32", "shape": [2**40, 8], "data_offsets": [0, 2**45]}}).encode()
    (cache / "target/head.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    vouch(cache, "target/head.safetensors")


def huge_header(cache: Path) -> None:
    (cache / "target/head.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    vouch(cache, "target/head.safetensors")


def large_statistics(cache: Path) -> None:
    save_numpy({"1.sum": np.zeros(2**20)}, cache / "stats.safetensors")
    vouch(cache, "stats.safetensors")


def config(text: str) -> Callable[[Path], None]:
    def build(cache: Path) -> None:
        (cache / "target/config.json").write_text(text, encoding="utf-8")
        vouch(cache, "target/config.json")

    return build


def unlisted(cache: Path) -> None:
    (cache / "target/chat_template.jinja").symlink_to("/etc/hostname")


def a_folder_for_a_file(cache: Path) -> None:
    (cache / SHARD / "tokens/c/0").unlink()
    (cache / SHARD / "tokens/c/0").mkdir()


HOSTILE: dict[str, Callable[[Path], None]] = {
    "the manifest is a link out": link_out("manifest.json"),
    "the plan is a link out": link_out("plan.json"),
    "the statistics are a link out": link_out("stats.safetensors"),
    "the target is a link out": link_out("target"),
    "the head is a link out": link_out("target/head.safetensors"),
    "all shards are a link out": link_out("shards"),
    "a shard is a link out": link_out(SHARD),
    "a record is a link out": link_out(f"{SHARD}/record.json"),
    "an array is a link out": link_out(f"{SHARD}/states/1"),
    "a data file is a link out": link_out(f"{SHARD}/states/4/c/0/0"),
    "metadata is a link out": link_out(f"{SHARD}/tokens/zarr.json"),
    "a link to a device without end": lambda cache: link(cache / SHARD / "tokens/c/0", "/dev/zero"),
    "a manifest that is a device": lambda cache: link(cache / "manifest.json", "/dev/zero"),
    "a link to itself": lambda cache: link(cache / SHARD / "tokens/c/0", "0"),
    "a link in the target that nobody lists": unlisted,
    "a folder in a file's place": a_folder_for_a_file,
    "a manifest that is a pipe": pipe("manifest.json"),
    "a plan that is a pipe": pipe("plan.json"),
    "a record that is a pipe": pipe(f"{SHARD}/record.json"),
    "a data file that is a pipe": pipe(f"{SHARD}/states/1/c/0/0"),
    "metadata that is a pipe": pipe(f"{SHARD}/states/1/zarr.json"),
    "a head that is a pipe": pipe("target/head.safetensors"),
    "a manifest of three gigabytes of holes": sparse("manifest.json", 3 * 2**30),
    "a plan of a terabyte of holes": sparse("plan.json", 2**40),
    "a data file of a terabyte of holes": sparse(f"{SHARD}/states/1/c/0/0", 2**40),
    "a row of a billion tokens": lambda cache: blown_up(cache, 10**9),
    "a row of ten million tokens": lambda cache: blown_up(cache, 10**7),
    "statistics that are NaN": nan_statistics(float("nan"), squares=True),
    "sums that are NaN": nan_statistics(float("nan"), squares=False),
    "statistics that are infinite": nan_statistics(float("inf"), squares=True),
    "squares below zero": nan_statistics(-1.0, squares=True),
    "statistics larger than any": large_statistics,
    "a head of another width": head(embed_tokens=torch.ones(50, 9), norm=torch.ones(9)),
    "a head of integers": head(embed_tokens=torch.ones(50, 8, dtype=torch.int32)),
    "a head with a tensor more": head(extra=torch.ones(1)),
    "a head that promises terabytes": lying_head,
    "a head with a header of exabytes": huge_header,
    "a config that is no object": config("[]"),
    "a config that is not JSON": config("{"),
    "a config deeper than any parser goes": config('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_cache_is_refused_in_bounded_memory(cache: Path, name: str) -> None:
    HOSTILE[name](cache)
    tracemalloc.start()
    try:
        with pytest.raises((CacheCorrupt, CacheMissing)) as refused:
            read_everything(cache)
        with suppress(DflashError):
            verify(cache)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < PEAK_BYTES
    assert str(cache) in str(refused.value)
    for words, reason in {"link out": "symbolic link leads out", "NaN": "not a finite", "tokens": "too few"}.items():
        assert words not in name or reason in str(refused.value)


def test_links_that_stay_inside_and_a_link_to_the_cache_are_fine(cache: Path, tmp_path: Path) -> None:
    (cache / "shards").rename(cache / "elsewhere")
    (cache / "shards").symlink_to("elsewhere")
    (tmp_path / "link").symlink_to(cache)
    read_everything(tmp_path / "link")
    assert verify(tmp_path / "link")["ok"]


def test_no_file_can_hold_more_than_the_ratio_that_is_refused() -> None:
    """The bound of decode.py: blosc cannot pack zeros tighter, so a larger promise is always a lie."""
    zeros = np.zeros(2**22, np.uint8)
    best = min(
        len(blosc.Blosc(name, level, shuffle, blocksize).encode(zeros))
        for name in ("zstd", "lz4", "zlib", "blosclz")
        for level in (1, 9)
        for shuffle in (blosc.NOSHUFFLE, blosc.SHUFFLE)
        for blocksize in (0, 2**22)
    )
    assert zeros.nbytes / best < MAX_RATIO


def test_a_file_of_zeros_reads_in_no_more_memory_than_it_declares(synthetic: ModuleType, tmp_path: Path) -> None:
    """The most that a small file may honestly expand to is what plan and manifest say, and a chunk."""
    (row,) = synthetic.make_rows([20_000], hidden=64)
    row.states.update({layer: torch.zeros_like(state) for layer, state in row.states.items()})
    synthetic.write_cache(tmp_path / "c", [row], shard_tokens=10**6)
    reader = open_cache(tmp_path / "c")
    assert (tmp_path / "c/shards/00000/states/1/c/0/0").stat().st_size < 2000
    declared = 20_000 * 64 * 2
    tracemalloc.start()
    reader.read_shard(0, layer_ids=[1], top_k=False)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert declared <= peak_bytes < declared + 20_000 * 5 + 2**22
