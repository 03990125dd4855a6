"""Prompt lookup: draft what followed the last few tokens when they last stood in the same text. It needs no training.

Source: prompt lookup decoding (Saxena, 2023), and the n-gram methods of serving engines; the newest match wins.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_MATCH = 3
NOTHING = -1
"""A draft that matches no token."""


def lookup_drafts(
    tokens: Sequence[int], anchors: Sequence[int], num_drafts: int, max_match: int = MAX_MATCH
) -> list[list[int]]:
    """Return `num_drafts` tokens for each anchor, NOTHING where no more are known.

    For the longest run of 1 to `max_match` tokens that ends at the anchor and stood in the row before, the tokens after
    its newest earlier place are drafted, as far as they lie at or before the anchor. No token after an anchor is read.

    Args:
        tokens: the ids of one row.
        anchors: rising positions in it.
        num_drafts: B-1.
        max_match: longest run to look up; 1 at least.
    """
    drafts = []
    newest: dict[tuple[int, ...], int] = {}  # a run of tokens -> the position after its newest place
    seen = 0
    for anchor in anchors:
        for end in range(seen + 1, anchor + 1):  # runs that end before the anchor, so that a token follows them
            for length in range(1, min(max_match, end) + 1):
                newest[tuple(tokens[end - length : end])] = end
        seen = max(seen, anchor)
        place = None
        for length in range(min(max_match, anchor + 1), 0, -1):
            place = newest.get(tuple(tokens[anchor + 1 - length : anchor + 1]))
            if place is not None:
                break
        found = [] if place is None else list(tokens[place : min(place + num_drafts, anchor + 1)])
        drafts.append(found + [NOTHING] * (num_drafts - len(found)))
    return drafts
