"""Prompt lookup drafts what a scan of the text would, and reads nothing after the anchor."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_pipeline.evaluate.baselines import TokenRow, lookup_tau
from dflash_pipeline.evaluate.lookup import lookup_drafts


def scan(text: list[int], num_drafts: int, max_match: int) -> list[int]:
    """The newest earlier place of the longest known suffix, by trying every place."""
    for length in range(min(max_match, len(text)), 0, -1):
        for place in range(len(text) - length - 1, -1, -1):
            if text[place : place + length] == text[len(text) - length :]:
                found = text[place + length :][:num_drafts]
                return found + [-1] * (num_drafts - len(found))
    return [-1] * num_drafts


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    skip=st.integers(1, 4),
    num_drafts=st.integers(1, 6),
    max_match=st.integers(1, 4),
)
def test_drafts_equal_a_scan_of_the_text(tokens: list[int], skip: int, num_drafts: int, max_match: int) -> None:
    anchors = list(range(0, len(tokens), skip))
    found = lookup_drafts(tokens, anchors, num_drafts, max_match)
    assert found == [scan(tokens[: anchor + 1], num_drafts, max_match) for anchor in anchors]


def test_tokens_after_the_anchor_change_nothing() -> None:
    one, other = [1, 2, 3, 4, 1, 2, 9, 9], [1, 2, 3, 4, 1, 2, 3, 4]
    assert lookup_drafts(one, [5], 4) == lookup_drafts(other, [5], 4) == [[3, 4, 1, 2]]


def test_a_reply_that_repeats_its_prompt_is_drafted_whole_and_a_new_one_not_at_all() -> None:
    prompt = list(range(20))
    copied = TokenRow(np.array([*prompt, *prompt], dtype=np.int32), np.arange(40) >= 20, 1)
    fresh = TokenRow(np.arange(40, dtype=np.int32), np.arange(40) >= 20, 2)
    assert lookup_tau([copied], block_size=8) == 19 / 3  # 19 tokens after the first: 8, 8 and 3
    assert lookup_tau([fresh], block_size=8) == 1.0
