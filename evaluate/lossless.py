"""Whether speculative decoding wrote what plain decoding wrote; where not, whether the target was undecided there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .speculate import Decoded

TIE_SHARE = {torch.bfloat16: 2.0**-6, torch.float32: 2.0**-17}
"""Two logits whose distance is within this share of the larger one's size are a tie: four steps of bfloat16, whose last
bits change with the number of tokens in a step; in float32 rounding alone."""


def compare(
    ids: Sequence[str], plain: Sequence[Decoded], other: Sequence[Decoded], dtype: torch.dtype
) -> dict[str, Any]:
    """Compare rows decoded plainly with the same rows decoded with a drafter.

    Args:
        ids: of the prompts.
        plain: greedy, with the first choices noted.
        other: the same prompts under the same limits.
        dtype: of the target.

    Returns:
        lossless: whether all tokens of all rows are equal. differences {ties, other}: in how many rows the first
        token that differs was a tie of the target's, and in how many not. different_rows: their id, the place of that
        token in the reply, the distance of the two logits (None: the other token was far behind), tie.
    """
    different = []
    for name, one, two in zip(ids, plain, other, strict=True):
        place = _first_difference(one.tokens, two.tokens)
        if place is None:
            continue
        distance = _distance(one, place, two.tokens[place])
        top = abs(one.near[place][1][0])
        tie = distance is not None and distance <= TIE_SHARE[dtype] * top
        different.append({"id": name, "token": place, "distance": distance, "tie": tie})
    ties = sum(bool(row["tie"]) for row in different)
    return {
        "lossless": not different,
        "differences": {"ties": ties, "other": len(different) - ties},
        "different_rows": different,
    }


def _first_difference(one: Sequence[int], two: Sequence[int]) -> int | None:
    """Return the first place where two replies differ. One is never a beginning of the other: both end by one rule."""
    return next((place for place, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]), None)


def _distance(plain: Decoded, place: int, token: int) -> float | None:
    ids, values = plain.near[place]
    return values[0] - values[ids.index(token)] if token in ids else None
