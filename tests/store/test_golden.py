"""Caches written by the first version of format 1, byte for byte: whatever changes, they must stay readable.

Made once by `write_golden` of synthetic.py. A change of the format makes new ones beside them; it never rewrites them.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore

from dflash_pipeline.store import open_cache, verify
from dflash_pipeline.store.plan import read_plan

GOLDEN = Path(__file__).parent / "golden"
DTYPES = ["bfloat16", "float32"]
IDENTITY = {"bfloat16": "0f01df027626d46560a1f15687f59e82", "float32": "e1434373fc128ea9d6801d81ff00995b"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_golden_cache_reads_bit_for_bit(synthetic: ModuleType, dtype: str) -> None:
    cache = open_cache(GOLDEN / dtype)
    assert cache.identity == IDENTITY[dtype]
    by_id = {row.id: row for row in synthetic.golden_rows(dtype)}
    found = [row for shard in range(cache.num_shards) for row in cache.read_shard(shard, final=True)]
    assert [row.id for row in found] == ["row-0-1-é", "row-0-0-é"]
    assert all(synthetic.same_rows(row, by_id[row.id]) for row in found)
    assert cache.manifest.dropped == {"NaN states": 1}
    assert verify(GOLDEN / dtype)["ok"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_zarr_alone_reads_a_golden_shard(synthetic: ModuleType, dtype: str) -> None:
    plan = read_plan(GOLDEN / dtype)
    by_id = {row.id: row for row in synthetic.golden_rows(dtype)}
    for directory in sorted((GOLDEN / dtype / "shards").iterdir()):
        if json.loads((directory / "record.json").read_bytes())["rows"] == 0:
            continue
        group = zarr.open_group(LocalStore(directory, read_only=True), mode="r")
        text, ends = bytes(group["row_ids"][...]), group["row_id_offsets"][...]
        ids = [text[start:stop].decode() for start, stop in pairwise(ends)]
        assert set(ids) <= set(plan.row_ids)
        offsets = group["row_offsets"][...]
        for place, name in enumerate(ids):
            here = slice(offsets[place], offsets[place + 1])
            np.testing.assert_array_equal(group["tokens"][here], by_id[name].tokens.numpy())
            stored = group["states/4"][here]
            kind = np.uint16 if dtype == "bfloat16" else np.uint32
            bits = by_id[name].states[4].view(synthetic.torch.int16 if dtype == "bfloat16" else synthetic.torch.int32)
            np.testing.assert_array_equal(stored.view(kind), bits.numpy().view(kind))
            assert group["states/4"].attrs["dtype"] == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_rows_give_the_golden_bytes_again(synthetic: ModuleType, tmp_path: Path, dtype: str) -> None:
    synthetic.write_golden(tmp_path / "c", dtype)
    ours, golden = synthetic.content(tmp_path / "c"), synthetic.content(GOLDEN / dtype)
    assert ours.keys() == golden.keys()
    assert ours["plan.json"] == golden["plan.json"]
    wrote = json.loads(golden["manifest.json"])["versions"]
    if wrote != {name: version(name) for name in wrote}:
        pytest.skip(f"other versions than {wrote} may compress to other bytes")
    assert ours == golden


def test_the_example_of_the_specification_runs(synthetic: ModuleType) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    directory = next(path for path in (GOLDEN / "bfloat16/shards").iterdir() if (path / "tokens").exists())
    names: dict[str, Any] = {}
    exec(example.replace("CACHE/shards/00000", str(directory)).replace("states/8", "states/4"), names)
    row = next(row for row in synthetic.golden_rows("bfloat16") if len(row.tokens) == len(names["states"]))
    assert synthetic.same_bits(names["states"], row.states[4])
