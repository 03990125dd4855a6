"""Slots, labels and weights follow the definitions."""

from __future__ import annotations

import math
import random

import pytest
import torch

from dflash_pipeline.train.labels import eligible_positions, supervise


def plain_slots(tokens, mask, target, row_end, anchor, block_size, cut):
    """The definitions of DESIGN section 5, word for word."""
    slots = []
    for k in range(1, block_size):
        position = anchor + k
        if position >= row_end or not mask[position]:
            break
        label = target[position - 1] if target is not None else tokens[position]
        slots.append((k, label))
        if cut and target is not None and label != tokens[position]:
            break
    return slots


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("labels", ["corpus", "target"])
def test_supervision_equals_the_definition_slot_by_slot(seed: int, labels: str) -> None:
    source = random.Random(seed)
    lengths = [source.randint(2, 20) for _ in range(3)]
    tokens = [source.randrange(4) for _ in range(sum(lengths))]
    mask = [source.random() < 0.85 for _ in tokens]
    target = [
        tokens[i + 1] if i + 1 < len(tokens) and source.random() < 0.7 else source.randrange(4)
        for i in range(len(tokens))
    ]
    block_size = source.choice([2, 4, 8])
    anchors, ends, start = [], [], 0
    for length in lengths:
        for a in range(start, start + length - 1):
            if mask[a] and mask[a + 1] and source.random() < 0.5:
                anchors.append(a)
                ends.append(start + length)
        start += length
    found = supervise(
        tokens_T=torch.tensor(tokens),
        loss_mask_T=torch.tensor(mask),
        anchors_A=torch.tensor(anchors, dtype=torch.int64),
        row_end_A=torch.tensor(ends, dtype=torch.int64),
        target_T=torch.tensor(target) if labels == "target" else None,
        block_size=block_size,
        gamma=3.0,
    )
    expected = [
        (number, k, label, math.exp(-(k - 1) / 3.0), anchor + k - 1)
        for number, (anchor, end) in enumerate(zip(anchors, ends, strict=True))
        for k, label in plain_slots(tokens, mask, target if labels == "target" else None, end, anchor, block_size, True)
    ]
    assert found.slots_N2.tolist() == [[number, k] for number, k, *_ in expected]
    assert found.labels_N.tolist() == [label for _, _, label, *_ in expected]
    assert found.sources_N.tolist() == [position for *_, position in expected]
    torch.testing.assert_close(
        found.weights_N, torch.tensor([weight for *_, weight, _ in expected], dtype=torch.float32)
    )


def test_an_eligible_anchor_is_supervised_itself_and_its_next_token_too() -> None:
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 1, 0, 1, 1], dtype=torch.bool)
    assert eligible_positions(mask).tolist() == [2, 3, 8]


def test_the_first_slot_where_the_target_differs_is_the_last_one_supervised() -> None:
    found = supervise(
        tokens_T=torch.tensor([5, 6, 7, 8, 9]),
        loss_mask_T=torch.ones(5, dtype=torch.bool),
        anchors_A=torch.tensor([0]),
        row_end_A=torch.tensor([5]),
        target_T=torch.tensor([6, 1, 8, 9, 0]),
        block_size=8,
        gamma=4.0,
    )
    assert found.slots_N2.tolist() == [[0, 1], [0, 2]]
    assert found.labels_N.tolist() == [6, 1]
