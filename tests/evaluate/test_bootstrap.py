"""The bootstrap interval covers the truth as often as it says."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_pipeline.errors import ConfigError
from dflash_pipeline.evaluate.bootstrap import micro_tau_interval


def draw_rows(source: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """Rows whose verifications and whose tau both differ; the true micro tau is 2.25 (see the test)."""
    hard = source.random(count) < 0.5
    verifications = np.where(hard, source.integers(20, 41, count), source.integers(5, 16, count))
    accepted = source.binomial(verifications * 7, np.where(hard, 1 / 7, 2 / 7))
    return verifications + accepted, verifications


def test_the_interval_contains_the_true_tau_in_about_95_percent_of_simulations() -> None:
    truth = 1 + (30 * 1 + 10 * 2) / (30 + 10)
    source = np.random.default_rng(0)
    covered = 0
    for seed in range(300):
        tokens, verifications = draw_rows(source, 60)
        low, high = micro_tau_interval(tokens, verifications, seed=seed, num_resamples=400)
        covered += low <= truth <= high
    assert 0.91 <= covered / 300 <= 0.98


def test_the_same_seed_gives_the_same_interval_and_it_brackets_tau() -> None:
    tokens, verifications = draw_rows(np.random.default_rng(1), 40)
    low, high = micro_tau_interval(tokens, verifications)
    assert (low, high) == micro_tau_interval(tokens, verifications)
    assert low < tokens.sum() / verifications.sum() < high


def test_draws_in_chunks_equal_draws_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, verifications = draw_rows(np.random.default_rng(2), 50)
    whole = micro_tau_interval(tokens, verifications)
    monkeypatch.setattr("dflash_pipeline.evaluate.bootstrap._CHUNK_DRAWS", 50 * 64)
    assert micro_tau_interval(tokens, verifications) == whole


def test_equal_rows_leave_no_width() -> None:
    assert micro_tau_interval(np.array([10, 20]), np.array([4, 8])) == (2.5, 2.5)


@pytest.mark.parametrize(("tokens", "verifications"), [([], []), ([1, 2], [1]), ([0, 3], [0, 2])])
def test_rows_without_a_tau_are_refused(tokens: list[int], verifications: list[int]) -> None:
    with pytest.raises(ConfigError, match="bootstrap"):
        micro_tau_interval(np.array(tokens), np.array(verifications))
