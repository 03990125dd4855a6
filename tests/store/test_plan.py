from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_pipeline.errors import CacheCorrupt, CacheMissing, ConfigError
from dflash_pipeline.store.plan import Plan, assign_rows, count_anchors, hash_prompt, read_plan, write_plan


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 400))
def test_every_row_is_in_one_shard_and_shards_keep_their_budget(lengths: list[int], budget: int) -> None:
    order, shard_rows = assign_rows(lengths, budget)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert sum(shard_rows) == len(lengths)
    ordered = [lengths[index] for index in order]
    start = 0
    for count in shard_rows:
        part = ordered[start : start + count]
        assert sum(part) <= budget or len(part) == 1
        start += count


def test_the_order_of_rows_never_changes() -> None:
    order, shard_rows = assign_rows([10] * 12, 35)
    assert order.tolist() == [11, 3, 2, 1, 8, 6, 0, 7, 4, 10, 5, 9]
    assert shard_rows == [3, 3, 3, 3]


def test_the_order_does_not_depend_on_the_lengths() -> None:
    assert assign_rows([1, 2, 3, 4], 2)[0].tolist() == assign_rows([4, 4, 4, 4], 9)[0].tolist()


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 120))
def test_batches_cover_a_shard_within_the_budget(synthetic: ModuleType, lengths: list[int], budget: int) -> None:
    rows = synthetic.make_rows(lengths)
    plan, _ = synthetic.make_plan(rows, synthetic.identity(batch_tokens=budget, shard_tokens=200))
    for shard in range(plan.num_shards):
        batches = plan.batches(shard)
        assert sorted(row for batch in batches for row in batch) == list(plan.shard_slice(shard))
        assert batches == plan.batches(shard)
        lengths_in_order = [int(plan.num_tokens[row]) for batch in batches for row in batch]
        assert lengths_in_order == sorted(lengths_in_order, reverse=True)
        for batch in batches:
            assert len(batch) == 1 or len(batch) * plan.batch_pad_length(batch) <= budget


def test_the_prompt_hash_never_changes() -> None:
    assert hash_prompt([1, 2, 3]) == "6bbf7429332bea48"
    assert hash_prompt(np.asarray([1, 2, 3], dtype=np.int64)) == hash_prompt([1, 2, 3])
    assert hash_prompt([]) == "2d06800538d394c2"


@pytest.mark.parametrize(
    ("mask", "anchors"), [([0, 0, 1, 1, 1], 2), ([1, 0, 1, 0, 1], 0), ([1, 1, 0, 1, 1], 2), ([1], 0), ([0, 0], 0)]
)
def test_an_anchor_needs_its_own_token_and_the_next(mask: list[int], anchors: int) -> None:
    assert count_anchors(np.asarray(mask, dtype=bool)) == anchors


def test_a_plan_round_trips(synthetic: ModuleType, tmp_path: Path) -> None:
    plan, _ = synthetic.make_plan(synthetic.make_rows(), synthetic.identity(max_length=99, keep_final=True))
    write_plan(tmp_path, plan)
    found = read_plan(tmp_path)
    assert found.fields() == plan.fields()
    assert found.digest == plan.digest


def test_skipped_rows_are_no_part_of_a_plan_s_digest(synthetic: ModuleType) -> None:
    plan, _ = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())
    values = {name: getattr(plan, name) for name in Plan.__dataclass_fields__}
    assert Plan(**{**values, "skipped": {}}).digest == plan.digest
    assert Plan(**{**values, "vocab_size": 51}).digest != plan.digest


@pytest.mark.parametrize(
    "changes",
    [
        {"row_ids": []},
        {"row_ids": ["same"] * 8},
        {"row_ids": [*"abcdefg", ""]},
        {"row_ids": [*"abcdefg", "\ud800"]},
        {"num_tokens": np.zeros(8)},
        {"num_tokens": np.ones(7)},
        {"num_prompt_tokens": np.full(8, 1000)},
        {"num_prompt_tokens": np.full(8, -1)},
        {"num_anchors": np.full(8, 1000)},
        {"num_anchors": np.full(8, -1)},
        {"prompt_hash": ["x" * 16] * 8},
        {"shard_rows": [3]},
        {"shard_rows": [8, 0]},
        {"shard_rows": [9, -1]},
        {"hidden_size": 0},
        {"vocab_size": 2**40},
    ],
    ids=str,
)
def test_columns_that_do_not_fit_are_refused(synthetic: ModuleType, changes: dict[str, Any]) -> None:
    plan, _ = synthetic.make_plan(synthetic.make_rows(), synthetic.identity())
    values = {name: getattr(plan, name) for name in Plan.__dataclass_fields__}
    with pytest.raises(ConfigError):
        Plan(**{**values, **changes})


def test_a_missing_plan_says_how_to_make_a_cache(tmp_path: Path) -> None:
    with pytest.raises(CacheMissing, match="dflash extract --out"):
        read_plan(tmp_path)


@pytest.mark.parametrize("cut", [0, 1, 100, -2])
def test_a_cut_plan_is_refused(cache: Path, cut: int) -> None:
    path = cache / "plan.json"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CacheCorrupt, match=r"plan\.json"):
        read_plan(cache)


def test_a_changed_byte_in_the_plan_is_noticed(cache: Path) -> None:
    data = (cache / "plan.json").read_bytes()
    for place in range(0, len(data) - 1, 13):
        changed = bytearray(data)
        changed[place] ^= 1
        (cache / "plan.json").write_bytes(changed)
        with pytest.raises((CacheCorrupt, ConfigError), match=r"plan\.json"):
            read_plan(cache)


Mutation = Callable[[dict[str, Any]], object]
HOSTILE: dict[str, Mutation] = {
    "no identity": lambda plan: plan.pop("identity"),
    "an identity that is a list": lambda plan: plan.update(identity=[]),
    "an unknown field": lambda plan: plan.update(extra=1),
    "an unknown field of the identity": lambda plan: plan["identity"].update(extra=1),
    "a float for a count": lambda plan: plan["num_tokens"].__setitem__(0, 7.0),
    "true for a count": lambda plan: plan["num_tokens"].__setitem__(0, True),
    "a string for a count": lambda plan: plan["num_tokens"].__setitem__(0, "7"),
    "a huge count": lambda plan: plan["num_tokens"].__setitem__(0, 2**63),
    "a negative count": lambda plan: plan["num_tokens"].__setitem__(0, -1),
    "a column that is an object": lambda plan: plan.update(row_ids={}),
    "a row id that is a number": lambda plan: plan["row_ids"].__setitem__(0, 5),
    "a column that is too short": lambda plan: plan["prompt_hash"].pop(),
    "shards that do not add up": lambda plan: plan["shard_rows"].append(1),
    "a shard without rows": lambda plan: plan["shard_rows"].insert(0, 0),
    "hidden size 0": lambda plan: plan.update(hidden_size=0),
    "a hidden size beyond all bounds": lambda plan: plan.update(hidden_size=2**40),
    "a dtype unknown to the format": lambda plan: plan["identity"].update(dtype="float16"),
    "doubled layers": lambda plan: plan["identity"].update(layer_ids=[1, 1]),
    "no layers": lambda plan: plan["identity"].update(layer_ids=[]),
    "a corpus digest that is none": lambda plan: plan["identity"]["corpus"][0].update(sha256="x"),
    "skipped counts below zero": lambda plan: plan["skipped"].update(a=-1),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_plan_is_refused(cache: Path, reseal: Callable[[Path, Mutation], None], name: str) -> None:
    reseal(cache / "plan.json", HOSTILE[name])
    with pytest.raises(CacheCorrupt, match=r"plan\.json"):
        read_plan(cache)


@pytest.mark.parametrize("text", ["[]", "null", "{", '{"a":1,"a":2}', '{"a":NaN}', "[" * 100_000, "9" * 10_000, "\xff"])
def test_what_is_not_a_json_object_is_refused(cache: Path, text: str) -> None:
    (cache / "plan.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CacheCorrupt, match=r"plan\.json"):
        read_plan(cache)


@pytest.mark.parametrize("version", [0, 2, "1", None, True])
def test_another_format_says_what_to_do(cache: Path, reseal: Callable[[Path, Mutation], None], version: object) -> None:
    reseal(cache / "plan.json", lambda plan: plan.update(format=version))
    with pytest.raises(ConfigError, match="reads format 1"):
        read_plan(cache)


def test_a_plan_file_is_canonical_json(cache: Path) -> None:
    text = (cache / "plan.json").read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"
