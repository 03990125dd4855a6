"""Two caches compared: every figure against a plain computation, and refusal of what cannot be compared."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from dflash_pipeline.errors import ConfigError
from dflash_pipeline.store import Row
from dflash_pipeline.store.diff import diff_caches


def changed(row: Row, **changes: object) -> Row:
    return Row(**{**vars(row), **changes})


def test_a_cache_equals_itself_in_other_shards(synthetic: ModuleType, pristine: Path, tmp_path: Path) -> None:
    synthetic.write_cache(tmp_path / "b", shard_tokens=50, batch_tokens=11)
    found = diff_caches(pristine, tmp_path / "b")
    assert (found["rows"], found["tokens"]) == (8, sum(synthetic.LENGTHS))
    assert (found["only_a"], found["only_b"], found["other_tokens"], found["top1_equal"]) == (0, 0, 0, 1.0)
    for layer in ("1", "4"):
        assert found["layers"][layer] == {
            "mean_cosine": 1.0,
            "min_cosine": 1.0,
            "max_error": 0.0,
            "relative_error": 0.0,
            "bit_equal": 1.0,
            "nonfinite_tokens": 0,
        }


def test_every_figure_is_that_of_a_plain_computation(synthetic: ModuleType, pristine: Path, tmp_path: Path) -> None:
    rows = synthetic.make_rows()
    other = []
    for index, row in enumerate(rows):
        states = {1: row.states[1].clone(), 4: row.states[4]}
        states[1][::3] += 0.25 * (index + 1)
        top_ids = row.top_ids.clone()
        top_ids[0, 0] = (top_ids[0, 0] + 1) % synthetic.VOCAB
        other.append(changed(row, states=states, top_ids=top_ids))
    synthetic.write_cache(tmp_path / "b", other, attention="eager")
    found = diff_caches(pristine, tmp_path / "b")
    left = torch.cat([row.states[1] for row in rows]).double()
    right = torch.cat([row.states[1] for row in other]).double()
    cosine = torch.nn.functional.cosine_similarity(left, right)
    layer = found["layers"]["1"]
    assert layer["mean_cosine"] == pytest.approx(cosine.mean().item(), rel=1e-12)
    assert layer["min_cosine"] == pytest.approx(cosine.min().item(), rel=1e-12)
    assert layer["max_error"] == (left - right).abs().max().item()
    error = (left - right).square().mean().sqrt() / left.square().mean().sqrt()
    assert layer["relative_error"] == pytest.approx(error.item(), rel=1e-12)
    assert layer["bit_equal"] == (left == right).double().mean().item()
    assert found["layers"]["4"]["bit_equal"] == 1.0
    assert found["top1_equal"] == 1 - 8 / sum(synthetic.LENGTHS)


def test_other_dtypes_layers_and_rows_are_compared_as_far_as_they_go(
    synthetic: ModuleType, pristine: Path, tmp_path: Path
) -> None:
    rows = synthetic.make_rows()
    wide = [changed(row, states={4: row.states[4].float(), 6: row.states[1].float()}) for row in rows[1:]]
    tokens = wide[0].tokens.clone()
    tokens[-1] = (tokens[-1] + 1) % synthetic.VOCAB
    wide[0] = changed(wide[0], tokens=tokens)
    extra = synthetic.make_rows([5], seed=9, dtype="float32", layer_ids=(4, 6))
    synthetic.write_cache(tmp_path / "b", [*wide, *extra], dtype="float32", layer_ids=(4, 6))
    found = diff_caches(pristine, tmp_path / "b")
    assert (found["rows"], found["only_a"], found["only_b"], found["other_tokens"]) == (6, 1, 1, 1)
    assert found["only_layers"] == [1, 6]
    assert found["layers"].keys() == {"4"}
    assert found["layers"]["4"]["bit_equal"] == 1.0  # bfloat16 widened is exact


def test_zeros_and_values_that_are_not_finite_are_counted(synthetic: ModuleType, tmp_path: Path) -> None:
    (row,) = synthetic.make_rows([6])
    states = {layer: row.states[layer].clone() for layer in (1, 4)}
    states[1][0], states[1][1, 0] = 0, float("nan")
    states[4][2] = 0
    synthetic.write_cache(tmp_path / "a", [changed(row, states=states)])
    other = {layer: states[layer].clone() for layer in (1, 4)}
    other[4][2, 0] = 1
    synthetic.write_cache(tmp_path / "b", [changed(row, states=other)])
    found = diff_caches(tmp_path / "a", tmp_path / "b")["layers"]
    assert found["1"] == {**found["1"], "nonfinite_tokens": 1, "mean_cosine": 1.0, "bit_equal": 1.0}
    assert found["4"]["min_cosine"] == 0.0  # a zero vector beside another one
    assert found["4"]["mean_cosine"] == pytest.approx(5 / 6)
    assert all(np.isfinite(list(layer.values())).all() for layer in found.values())


def test_caches_with_nothing_in_common_are_refused(synthetic: ModuleType, pristine: Path, tmp_path: Path) -> None:
    synthetic.write_cache(tmp_path / "rows", synthetic.make_rows(seed=3))
    with pytest.raises(ConfigError, match="no row in common"):
        diff_caches(pristine, tmp_path / "rows")
    synthetic.write_cache(tmp_path / "layers", synthetic.make_rows(layer_ids=(2,)), layer_ids=(2,))
    with pytest.raises(ConfigError, match="none is in both"):
        diff_caches(pristine, tmp_path / "layers")
    synthetic.write_cache(tmp_path / "wide", synthetic.make_rows(hidden=16))
    with pytest.raises(ConfigError, match="two different targets"):
        diff_caches(pristine, tmp_path / "wide")
