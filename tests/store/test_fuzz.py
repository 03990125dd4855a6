"""Property tests of hostile JSON: whatever a cache's files say, only DflashErrors come out, with bounded memory.

`make fuzz` runs 5,000 examples of each property; the ordinary tests a few hundred.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_pipeline.errors import DflashError
from dflash_pipeline.store import Row, open_cache, verify
from dflash_pipeline.store.jsonfile import digest_bytes, seal

FULL = os.environ.get("DFLASH_FUZZ") == "full"
PEAK_BYTES = 8 * 2**20  # the cache has 30 kB


def fuzz(few: int) -> settings:
    """So many examples, always the same ones, in the ordinary tests; 5,000 new ones in `make fuzz`."""
    return settings(
        max_examples=5000 if FULL else few,
        deadline=None,
        derandomize=not FULL,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )


NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 7, 255, 2**31, 2**53 + 1, 2**62, 2**63, 2**64, 10**30, -(10**30)),
    *(0.0, -0.0, 1.0, 0.5, 5e-324, 1e300, -1e300, 1e38, 2**127.5),
    *("", "..", ".", "/", "../../etc/passwd", "/etc/passwd", "a\\b", "c:", "\0", "lossless", "q4", "bfloat16", "int8"),
    *("0" * 32, "f" * 64, "é", "\u202e", "x" * 5000, "1", "NaN", "row-0-0-é"),
    *([], {}, [[]], [None], {"": 0}, [0] * 1000, {"bytes": 1, "xxh3": "0" * 32}),
]
VALUES = st.one_of(
    st.sampled_from(NASTY),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)


@pytest.fixture(scope="module")
def fuzzed(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Row]]:
    """A small cache and its rows. Each example puts back what it changed."""
    path: Path = tmp_path_factory.mktemp("fuzz") / "cache"
    rows = synthetic.make_rows([5, 9, 4], layer_ids=(1,))
    synthetic.write_cache(path, rows, {rows[2].id: "NaN states"}, layer_ids=(1,), shard_tokens=12)
    return path, read_rows(path)


def read_rows(path: Path) -> list[Row]:
    cache = open_cache(path)
    cache.head()
    for layer in cache.layer_ids:
        cache.channel_rms(layer)
    assert cache.target_config() == {"hidden_size": 8}
    assert cache.target_dir.is_dir()
    return [row for shard in range(cache.num_shards) for row in cache.read_shard(shard)]


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path into a JSON value but the empty one."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield (*here, key)
        yield from places(child, (*here, key))


def parent_of(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place[:-1]:
        value = value[key]
    return value


def mutate(draw: st.DrawFn, value: dict[str, Any]) -> None:
    """Change one place: another value, gone, doubled, swapped with another place, renamed, or a step away."""
    every = list(places(value))
    place = draw(st.sampled_from(every))
    parent, key = parent_of(value, place), place[-1]
    kind = draw(st.sampled_from(["set", "set", "delete", "double", "swap", "rename", "step"]))
    if kind == "set":
        parent[key] = copy.deepcopy(draw(VALUES))  # a later change must not reach the list of values
    elif kind == "delete":
        del parent[key]
    elif kind == "double" and isinstance(parent, list):
        parent.insert(key, parent[key])
    elif kind == "swap":
        other = draw(st.sampled_from(every))
        if place[: len(other)] != other and other[: len(place)] != place:
            their = parent_of(value, other)
            parent[key], their[other[-1]] = their[other[-1]], parent[key]
    elif kind == "rename" and isinstance(parent, dict):
        parent[draw(st.sampled_from([name for name in NASTY if isinstance(name, str)]))] = parent.pop(key)
    elif kind == "step" and type(parent[key]) in (int, float):
        parent[key] += draw(st.sampled_from([-1, 1, 8, 2**31, -(2**31)]))


def look(path: Path, synthetic: ModuleType, truth: list[Row]) -> None:
    """Verify and read: an error of ours, or the true rows; within bounded memory."""
    tracemalloc.start()
    with suppress(DflashError):
        verify(path, num_workers=1)
    rows = truth
    with suppress(DflashError):
        rows = read_rows(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < PEAK_BYTES
    assert all(synthetic.same_rows(*pair) for pair in zip(rows, truth, strict=True))


def restored(path: Path, *names: str) -> Callable[[], None]:
    before = {name: (path / name).read_bytes() for name in names}

    def restore() -> None:
        for name, data in before.items():
            (path / name).write_bytes(data)

    return restore


@fuzz(250)
@given(st.data())
def test_a_mutated_manifest_gives_our_errors_or_the_true_rows(
    synthetic: ModuleType, fuzzed: tuple[Path, list[Row]], data: st.DataObject
) -> None:
    path, truth = fuzzed
    restore = restored(path, "manifest.json")
    fields = json.loads((path / "manifest.json").read_bytes())
    del fields["digest"]

    @st.composite
    def mutated(draw: st.DrawFn) -> dict[str, Any]:
        value = json.loads(json.dumps(fields))
        for _ in range(draw(st.integers(1, 3))):
            if value:
                mutate(draw, value)
        return value

    try:
        (path / "manifest.json").write_bytes(seal(data.draw(mutated())))
        look(path, synthetic, truth)
    finally:
        restore()


@fuzz(80)
@given(st.data())
def test_a_mutated_plan_or_record_that_the_manifest_vouches_for_gives_our_errors_or_the_true_rows(
    synthetic: ModuleType, fuzzed: tuple[Path, list[Row]], data: st.DataObject
) -> None:
    """The hostile author seals the changed file, and enters it into a manifest that is sealed again.

    The plan alone names the rows, so its author may call them anything; what they hold is the shards'.
    """
    path, truth = fuzzed
    name = data.draw(st.sampled_from(["plan.json", "shards/00001/record.json"]))
    restore = restored(path, "manifest.json", name)
    fields = json.loads((path / name).read_bytes())
    del fields["digest"]

    @st.composite
    def mutated(draw: st.DrawFn) -> dict[str, Any]:
        value = json.loads(json.dumps(fields))
        mutate(draw, value)
        return value

    value = data.draw(mutated())
    try:
        changed = seal(value)
        (path / name).write_bytes(changed)
        manifest = json.loads((path / "manifest.json").read_bytes())
        del manifest["digest"]
        if name == "plan.json":
            manifest["files"][name] = {"bytes": len(changed), "xxh3": digest_bytes(changed)}
            manifest["identity"] = value.get("identity")
            names = value.get("row_ids")
            if isinstance(names, list) and len(names) == len(fields["row_ids"]):
                named = dict(zip(fields["row_ids"], names, strict=True))
                truth = [replace(row, id=named[row.id]) for row in truth]
        else:
            manifest["shards"][1] = {key: entry for key, entry in value.items() if key != "format"}
        (path / "manifest.json").write_bytes(seal(manifest))
        look(path, synthetic, truth)
    finally:
        restore()


JSON = st.recursive(VALUES, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=8), inner), max_leaves=30)


@fuzz(80)
@given(value=JSON, raw=st.binary(max_size=200), place=st.integers(0, 2**20), kind=st.integers(0, 2))
def test_any_json_or_bytes_in_place_of_a_manifest_give_our_errors(
    fuzzed: tuple[Path, list[Row]], synthetic: ModuleType, value: Any, raw: bytes, place: int, kind: int
) -> None:
    path, truth = fuzzed
    file = path / "manifest.json"
    restore, data = restored(path, "manifest.json"), file.read_bytes()
    try:
        if kind == 0:
            file.write_bytes(json.dumps(value).encode())  # ASCII: surrogates are spelled
        elif kind == 1:
            file.write_bytes(raw)
        else:
            place %= len(data)
            file.write_bytes(data[:place] + raw + data[place + len(raw) // 2 :])
        look(path, synthetic, truth)
    finally:
        restore()


EDGES = {
    "a lone surrogate": '"\\ud800"',
    "a lone surrogate as a key": '{"\\udfff": 1}',
    "a number that overflows": "1e999",
    "more digits than Python converts": "9" * 5000,
    "deeper than any parser goes": "[" * 100_000 + "]" * 100_000,
    "nearly too deep": "[" * 900 + "]" * 900,
    "not a number": "NaN",
}


@pytest.mark.parametrize("edge", sorted(EDGES))
@pytest.mark.parametrize("name", ["manifest.json", "plan.json", "shards/00001/record.json"])
def test_json_at_the_edges_of_the_language_gives_our_errors(
    fuzzed: tuple[Path, list[Row]], tmp_path: Path, name: str, edge: str
) -> None:
    path = Path(shutil.copytree(fuzzed[0], tmp_path / "c"))
    text = '{"digest": "' + "0" * 32 + '", "format": 1, "x": ' + EDGES[edge] + "}"
    (path / name).write_text(text, encoding="utf-8")
    with pytest.raises(DflashError, match=name.rpartition("/")[2]):
        read_rows(path)
