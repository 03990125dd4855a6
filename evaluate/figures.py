"""The figures of a set of walks, as JSON values: the same keys for offline walks, live decoding and trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..drafter.walk import RowWalk, acceptance_rates, macro_tau, micro_tau
from .bootstrap import micro_tau_interval


def walk_figures(walks: Sequence[RowWalk], block_size: int) -> dict[str, Any]:
    """Return rows, verifications, tokens, tau {micro, macro, ci95} and acceptance_rate [B-1].

    Rows without a verification (a reply of one token) are left out; there must be others.

    Raises:
        ConfigError: no row has a verification.
    """
    walks = [walk for walk in walks if walk.verifications]
    tokens = np.array([walk.tokens for walk in walks])
    verifications = np.array([walk.verifications for walk in walks])
    return {
        "rows": len(walks),
        "verifications": int(verifications.sum()),
        "tokens": int(tokens.sum()),
        "tau": {
            "micro": micro_tau(walks),
            "macro": macro_tau(walks),
            "ci95": list(micro_tau_interval(tokens, verifications)),
        },
        "acceptance_rate": acceptance_rates(walks, block_size),
    }
