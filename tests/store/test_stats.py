from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from dflash_pipeline.errors import CacheCorrupt, CacheMissing
from dflash_pipeline.store.record import LayerStats, merge_stats
from dflash_pipeline.store.rows import as_stored
from dflash_pipeline.store.stats import add_sums, channel_rms, measure, read_sums, sums_bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_statistics_equal_a_plain_computation(synthetic: ModuleType, dtype: str) -> None:
    states = synthetic.state_bits(3, (300, 5), dtype)
    states[7, 2], states[8, 3] = 0.0, -0.0
    stats, sums = measure(as_stored(states))
    wide = states.double()
    assert (stats.values, stats.zeros, stats.nans, stats.infs) == (1500, 2, 0, 0)
    assert stats.mean == pytest.approx(wide.mean().item(), rel=1e-12)
    assert stats.rms == pytest.approx(wide.square().mean().sqrt().item(), rel=1e-12)
    np.testing.assert_allclose(sums.total, wide.sum(0).numpy(), rtol=1e-12)
    np.testing.assert_allclose(channel_rms(sums, 300).numpy(), wide.square().mean(0).sqrt().numpy(), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_that_are_not_finite_are_counted_and_left_out(dtype: torch.dtype) -> None:
    states = torch.ones(4, 3, dtype=dtype)
    states[0, 0], states[1, 1], states[2, 1] = math.nan, math.inf, -math.inf
    stats, sums = measure(as_stored(states))
    assert (stats.values, stats.nans, stats.infs, stats.mean, stats.rms) == (12, 1, 2, 1.0, 1.0)
    assert sums.total.tolist() == [3.0, 2.0, 4.0]


def test_nothing_measures_as_nothing() -> None:
    stats, _ = measure(np.zeros((0, 3), np.uint16))
    assert stats == LayerStats(values=0, zeros=0, nans=0, infs=0, mean=0.0, rms=0.0)


def test_shards_join_to_the_whole(synthetic: ModuleType) -> None:
    stored = as_stored(synthetic.state_bits(3, (300, 5), "float32"))
    parts = [measure(stored[:100]), measure(stored[100:])]
    whole, sums = measure(stored)
    joined = merge_stats([stats for stats, _ in parts])
    assert joined.mean == pytest.approx(whole.mean, rel=1e-12)
    assert joined.rms == pytest.approx(whole.rms, rel=1e-12)
    assert (joined.values, joined.zeros) == (whole.values, whole.zeros)
    np.testing.assert_allclose(add_sums([{1: part} for _, part in parts])[1].squares, sums.squares, rtol=1e-12)


def test_sums_round_trip_and_are_checked(tmp_path: Path) -> None:
    _, sums = measure(np.ones((4, 3), np.float32))
    path = tmp_path / "stats.safetensors"
    path.write_bytes(sums_bytes({1: sums}))
    assert read_sums(tmp_path, (1,), 3)[1].total.tolist() == [4.0, 4.0, 4.0]
    for layer_ids, hidden in (((2,), 3), ((1,), 4)):
        with pytest.raises(CacheCorrupt, match="stats"):
            read_sums(tmp_path, layer_ids, hidden)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CacheCorrupt, match="stats"):
        read_sums(tmp_path, (1,), 3)
    path.unlink()
    with pytest.raises(CacheMissing, match="stats"):
        read_sums(tmp_path, (1,), 3)
