"""A/B: two drafters on the same rows and the same anchors, and what the difference is worth.

Both are drafted at every eligible anchor of every row, so their slots are compared anchor by anchor; each then walks
the rows on its own.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..drafter.checkpoint import LoadedDrafter
from ..drafter.walk import macro_tau, micro_tau
from ..errors import ConfigError
from ..store import CacheReader
from ..store.splits import heldout_rows
from .bootstrap import paired_difference_interval
from .walks import Figures

_RECORDED = {"tokenizer_hash": "tokenizer", "target_fingerprint": "target"}


def check_comparable(path: Path, drafter: LoadedDrafter, cache: CacheReader) -> None:
    """Refuse a drafter that was trained for another tokenizer or target than the cache's.

    Drafters of others record neither; their sizes and layers are checked all the same (`check_match`). Weights of one
    target in two dtypes have two fingerprints, so the target is compared where the dtype is the same.

    Raises:
        ConfigError: naming what differs.
    """
    identity = cache.manifest.identity
    for key, what in _RECORDED.items():
        recorded, here = drafter.extra.get(key), getattr(identity, key)
        if key == "target_fingerprint" and drafter.extra.get("target_dtype") != identity.dtype:
            continue
        if recorded is not None and recorded != here:
            raise ConfigError(
                f"{path}: trained for another {what} ({key} {recorded}) than {cache.place} ({here}): the two drafters "
                "are not comparable on these rows; compare each with others of its own target"
            )


def unseen_rows(rows: NDArray[np.int64], drafter: LoadedDrafter, cache: CacheReader) -> NDArray[np.int64]:
    """Return those of `rows` [R] that are held out from this drafter too, where it was trained on this cache.

    Raises:
        ConfigError: none is.
    """
    share = drafter.extra.get("heldout_share")
    if drafter.extra.get("cache_identity") != cache.identity or share is None:
        return rows
    kept = rows[heldout_rows(cache.prompt_hash[rows], share)]
    if len(kept) == 0:
        raise ConfigError(
            f"{cache.place}: no row is held out from both drafters (the other one holds out {share:g}); compare them "
            "on another cache, or with --split all"
        )
    return kept


def comparison(path: Path, ours: Figures, theirs: Figures, other: LoadedDrafter) -> dict[str, Any]:
    """Return the JSON object `against`.

    Returns:
        drafter, block_size, context_layer_ids, tau and macro_tau of the other drafter; difference, the first drafter's
        micro tau less the other's, with ci95, its paired bootstrap interval over rows; per_slot_accuracy [B-1] of the
        other; slot_difference, the first's accuracy less the other's in the slots that both have; rows; anchors, at
        which both were drafted.
    """
    counted = [[(walk.tokens, walk.verifications) for walk in figures.walks] for figures in (ours, theirs)]
    pairs = list(zip(ours.slots.accuracy, theirs.slots.accuracy, strict=False))
    return {
        "drafter": str(path),
        "block_size": other.config.block_size,
        "context_layer_ids": list(other.config.context_layer_ids),
        "tau": micro_tau(theirs.walks),
        "macro_tau": macro_tau(theirs.walks),
        "difference": micro_tau(ours.walks) - micro_tau(theirs.walks),
        "ci95": list(paired_difference_interval(*(np.array(side).T for side in counted))),
        "per_slot_accuracy": [_number(value) for value in theirs.slots.accuracy],
        "slot_difference": [_number(mine - other) for mine, other in pairs],
        "rows": len(theirs.walks),
        "anchors": int(theirs.slots.totals[0]),
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
