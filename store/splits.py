"""Which rows of a cache are held out: a pure function of each row's prompt and of the run's share.

Duplicates of a prompt fall on the same side, whatever file or position they come from.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError

SPLITS = ("heldout", "train", "all")


def heldout_rows(prompt_hash: NDArray[np.uint64], share: float) -> NDArray[np.bool_]:
    """Return a mask [R] of held-out rows: those whose prompt hash, as a fraction of 2**64, lies under `share`.

    Args:
        prompt_hash: [R] uint64, the xxh3 hash of each row's prompt token ids.
        share: 0 <= share < 1.

    Raises:
        ConfigError: the share is outside its range.
    """
    if not 0 <= share < 1:
        raise ConfigError(f"held-out share {share}: expected a number from 0 up to, but not including, 1")
    threshold = np.uint64(min(int(share * 2.0**64), 2**64 - 1))
    return np.asarray(prompt_hash, dtype=np.uint64) < threshold


def split_rows(prompt_hash: NDArray[np.uint64], share: float, split: str) -> NDArray[np.int64]:
    """Return the indices of the rows of one split, `heldout`, `train` or `all`, in cache order.

    Raises:
        ConfigError: the split is unknown.
    """
    if split not in SPLITS:
        raise ConfigError(f"split {split!r}: expected one of {', '.join(SPLITS)}")
    if split == "all":
        return np.arange(len(prompt_hash), dtype=np.int64)
    heldout = heldout_rows(prompt_hash, share)
    return np.flatnonzero(heldout if split == "heldout" else ~heldout).astype(np.int64)
