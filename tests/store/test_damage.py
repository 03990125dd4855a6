"""Random damage to any file of a cache: `verify` finds all of it, and no reader hands out a wrong bit.

`make fuzz` runs 1,000 flips and 200 truncations; the ordinary tests a part of the same sequence.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dflash_pipeline.errors import DflashError
from dflash_pipeline.store import Row, open_cache, verify

FULL = os.environ.get("DFLASH_FUZZ") == "full"
Everything = tuple[list[Row], list[torch.Tensor], list[bytes]]
NUM_FLIPS, NUM_CUTS = (1000, 200) if FULL else (120, 60)


@pytest.fixture(scope="module")
def small(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with everything a cache may hold: final states, an untied head, dropped rows, a shard without rows."""
    path: Path = tmp_path_factory.mktemp("damage") / "cache"
    rows = synthetic.make_rows(final=True)
    plan, _ = synthetic.make_plan(rows, synthetic.identity(keep_final=True))
    gone = {plan.row_ids[row]: "NaN states" for row in plan.shard_slice(1)}
    synthetic.write_cache(path, rows, gone, keep_final=True)
    assert verify(path)["ok"]
    return path


def everything(path: Path) -> Everything:
    """All that a trainer or an evaluation can read of a cache."""
    cache = open_cache(path)
    rows = [row for shard in range(cache.num_shards) for row in cache.read_shard(shard, final=True)]
    head = cache.head()
    tensors = [head.embed_tokens, head.head_weight, head.norm, torch.tensor(head.norm_eps)]
    tensors += [cache.channel_rms(layer) for layer in cache.layer_ids]
    tensors += [torch.from_numpy(column) for column in (cache.num_tokens, cache.num_prompt_tokens, cache.num_anchors)]
    texts = [str([cache.identity, cache.fingerprint, cache.target_config(), cache.prompt_hash.tolist()]).encode()]
    texts += [file.read_bytes() for file in sorted(cache.target_dir.iterdir()) if file.name != "head.safetensors"]
    return rows, tensors, texts


def places(path: Path) -> list[Path]:
    return [file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.startswith(".")]


def attempt(function: Callable[[Path], Any], path: Path) -> tuple[Any, str]:
    """Return what a function returns, or the message of its error."""
    try:
        return function(path), ""
    except DflashError as error:
        return None, str(error)


def check(synthetic: ModuleType, path: Path, truth: Everything, file: Path, damaged: bytes) -> bool:
    """Put other bytes in one file, look, and put it back; tell whether reading raised."""
    data = file.read_bytes()
    file.write_bytes(damaged)
    found, refused = attempt(verify, path)
    read, stopped = attempt(everything, path)
    file.write_bytes(data)
    if refused:
        assert file.name in refused
    else:
        assert not found["ok"], f"verify calls the cache intact with a damaged {file}"
        assert any(str(file) in problem for problem in found["problems"])
    if stopped:
        assert str(file) in stopped
        return True
    assert all(synthetic.same_rows(*pair) for pair in zip(read[0], truth[0], strict=True))
    assert all(torch.equal(*pair) for pair in zip(read[1], truth[1], strict=True))
    assert read[2] == truth[2]
    return False


def choose(source: random.Random, files: list[Path], weights: list[int]) -> Path:
    """Return a file: every other time each is as likely, else each byte."""
    return source.choice(files) if source.random() < 0.5 else source.choices(files, weights)[0]


def test_every_flipped_bit_is_found_and_none_is_read(synthetic: ModuleType, small: Path) -> None:
    truth = everything(small)
    source, files = random.Random(7), [file for file in places(small) if file.stat().st_size]
    weights = [file.stat().st_size for file in files]
    raised = 0
    for _ in range(NUM_FLIPS):
        file = choose(source, files, weights)
        changed = bytearray(file.read_bytes())
        bit = source.randrange(8 * len(changed))
        changed[bit // 8] ^= 1 << bit % 8
        raised += check(synthetic, small, truth, file, bytes(changed))
    assert raised > NUM_FLIPS // 3  # the others were in files that no reader opens
    assert verify(small)["ok"]


def test_every_truncation_is_found_and_none_is_read(synthetic: ModuleType, small: Path) -> None:
    truth = everything(small)
    source, files = random.Random(8), [file for file in places(small) if file.stat().st_size]
    weights = [file.stat().st_size for file in files]
    for _ in range(NUM_CUTS):
        file = choose(source, files, weights)
        size = file.stat().st_size
        keep = size - 1 if source.random() < 0.2 else source.randrange(size)
        check(synthetic, small, truth, file, file.read_bytes()[:keep])
    assert verify(small)["ok"]


@pytest.mark.parametrize("name", ["manifest.json", "plan.json", "shards/00000/record.json"])
def test_another_spelling_of_the_same_values_is_found(small: Path, name: str) -> None:
    """The digest of a JSON file covers values: these keep them all."""
    file = small / name
    data = file.read_bytes()
    for other in (data[:-1], data + b"\n", b" " + data, data.replace(b'"rows"', b'"\\u0072ows"')):
        if other == data:
            continue
        file.write_bytes(other)
        found, refused = attempt(verify, small)
        assert refused or not found["ok"]
        _, stopped = attempt(lambda path: open_cache(path).read_shard(0), small)
        assert file.name in stopped
        file.write_bytes(data)
    assert verify(small)["ok"]
