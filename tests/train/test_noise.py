"""Noise has the stated size and schedule, and is fixed by seed and step."""

from __future__ import annotations

import pytest
import torch

from dflash_pipeline.train.noise import add_noise, noise_scale_at


@pytest.mark.parametrize("kind", ["uniform", "gaussian"])
def test_noise_is_relative_to_each_channel_and_repeats_exactly(kind: str) -> None:
    rms = torch.tensor([0.1, 1.0, 100.0])
    clean = torch.zeros(20_000, 3)
    first = add_noise(clean, rms, kind=kind, scale=0.5, seed=1, draw=2)
    assert torch.equal(first, add_noise(clean, rms, kind=kind, scale=0.5, seed=1, draw=2))
    assert not torch.equal(first, add_noise(clean, rms, kind=kind, scale=0.5, seed=1, draw=3))
    expected = 0.5 * rms * (1 if kind == "gaussian" else 3**-0.5)
    torch.testing.assert_close(first.std(0), expected, rtol=0.03, atol=0)


@pytest.mark.parametrize(
    ("schedule", "values"), [("constant", [2, 2, 2]), ("linear", [2, 1, 0.02]), ("cosine", [2, 1, 0.000493])]
)
def test_schedules_fall_to_zero_over_the_run(schedule: str, values: list[float]) -> None:
    found = [noise_scale_at(step, 100, 2.0, schedule) for step in (0, 50, 99)]
    assert found == pytest.approx(values, rel=1e-2)
