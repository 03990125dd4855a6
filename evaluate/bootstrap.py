"""Percentile bootstrap over rows: how far tau could move had other rows of the same kind been drawn."""

from __future__ import annotations

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
    generator = np.random.default_rng(seed)
    taus = np.empty(num_resamples, dtype=np.float64)
    chunk = max(1, _CHUNK_DRAWS // len(tokens))
    for start in range(0, num_resamples, chunk):
        size = min(chunk, num_resamples - start)
        drawn = generator.integers(0, len(tokens), size=(size, len(tokens)))
        taus[start : start + size] = tokens[drawn].sum(axis=1) / verifications[drawn].sum(axis=1)
    outside = (1 - confidence) / 2
    low, high = np.quantile(taus, [outside, 1 - outside])
    return float(low), float(high)
