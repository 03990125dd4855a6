"""Percentile bootstrap over rows: how far tau could move had other rows of the same kind been drawn."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError

NUM_RESAMPLES = 2000
_CHUNK_DRAWS = 4_000_000


def micro_tau_interval(
    tokens: NDArray[np.int64],
    verifications: NDArray[np.int64],
    *,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
    confidence: float = 0.95,
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of micro tau, sum of tokens / sum of verifications.

    Rows are drawn with replacement, as many as there are; a row's tokens and verifications stay together. From a single
    row both ends are its tau: one row says nothing about others.

    Args:
        tokens: [R] emitted tokens of each row.
        verifications: [R] verifications of each row, at least one.
        seed: of the draws; the same seed gives the same interval.
        num_resamples: number of resamples.
        confidence: share of the resamples between the two ends.

    Raises:
        ConfigError: there is no row, the lengths differ, or a row has no verification.
    """
    tokens, verifications = np.asarray(tokens, dtype=np.int64), np.asarray(verifications, dtype=np.int64)
    if len(tokens) == 0 or tokens.shape != verifications.shape:
        raise ConfigError(
            f"bootstrap over {len(tokens)} and {len(verifications)} rows: expected as many of both, not 0"
        )
    if (verifications < 1).any():
        raise ConfigError("bootstrap: a row without a verification has no tau; leave it out")
    return _interval(_resampled(np.stack([tokens, verifications]), seed, num_resamples, _ratio), confidence)


def paired_difference_interval(
    ours: NDArray[np.int64],
    theirs: NDArray[np.int64],
    *,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
    confidence: float = 0.95,
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the difference of two micro taus over the same rows.

    A resample draws rows, and each drawn row counts for both: what makes a row easy for both drafters cancels.

    Args:
        ours, theirs: [2, R] tokens and verifications of each row, of the first and of the other drafter.
        seed, num_resamples, confidence: as in `micro_tau_interval`.

    Raises:
        ConfigError: the rows are not the same number, or a row has no verification.
    """
    both = np.concatenate([np.asarray(ours), np.asarray(theirs)]) if ours.shape == theirs.shape else None
    if both is None or both.shape[1] == 0 or (both[1::2] < 1).any():
        raise ConfigError(f"bootstrap over {ours.shape[1]} and {theirs.shape[1]} rows: expected as many of both, not 0")
    return _interval(
        _resampled(both, seed, num_resamples, lambda sums: _ratio(sums[:2]) - _ratio(sums[2:])), confidence
    )


def _resampled(
    counts: NDArray[np.int64], seed: int, num_resamples: int, figure: Callable[[NDArray[np.int64]], NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Return [num_resamples] values of `figure` over the sums [K, size] of counts [K, R] in rows drawn again."""
    generator = np.random.default_rng(seed)
    num_rows = counts.shape[1]
    values = np.empty(num_resamples, dtype=np.float64)
    chunk = max(1, _CHUNK_DRAWS // num_rows)
    for start in range(0, num_resamples, chunk):
        size = min(chunk, num_resamples - start)
        drawn = generator.integers(0, num_rows, size=(size, num_rows))
        values[start : start + size] = figure(np.stack([column[drawn].sum(axis=1) for column in counts]))
    return values


def _ratio(sums: NDArray[np.int64]) -> NDArray[np.float64]:
    ratio: NDArray[np.float64] = sums[0] / sums[1]
    return ratio


def _interval(values: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    outside = (1 - confidence) / 2
    low, high = np.quantile(values, [outside, 1 - outside])
    return float(low), float(high)
