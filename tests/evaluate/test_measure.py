"""What is counted equals a slow walk, anchor by anchor, and accepted runs that are known beforehand."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from dflash_pipeline.drafter.model import DFlashDrafter
from dflash_pipeline.drafter.walk import acceptance_rates, macro_tau, micro_tau
from dflash_pipeline.evaluate.measure import TOP_M, FrozenHead, measure_pack
from dflash_pipeline.evaluate.trees import grow_tree
from dflash_pipeline.store import Row, TargetHead

Slow = tuple[list[tuple[int, int, int]], Counter[int], Counter[int]]


def slow_figures(kit: SimpleNamespace, model: DFlashDrafter, head: TargetHead, row: Row) -> Slow:
    """Return (anchor, accepted, emitted) per verification, and hits and totals per slot, one block at a time."""
    tokens, mask = row.tokens.tolist(), [*row.loss_mask.tolist(), False]
    block, length = model.config.block_size, len(row.tokens)
    drafts, hits, totals = {}, Counter[int](), Counter[int]()
    for anchor in range(length - 1):
        if not (mask[anchor] and mask[anchor + 1]):
            continue
        drafts[anchor] = kit.slow_draft(model, head, row.states, anchor, tokens[anchor])
        for slot in range(1, block):
            if not all(mask[anchor + 1 : anchor + slot + 1]):
                break
            totals[slot] += 1
            hits[slot] += drafts[anchor][slot - 1] == tokens[anchor + slot]
    walk = []
    position = 0
    while position < length:
        if position not in drafts:
            position += 1
            continue
        accepted = 0
        while accepted < block - 1 and mask[position + accepted + 1]:
            if drafts[position][accepted] != tokens[position + accepted + 1]:
                break
            accepted += 1
        left = 0
        while mask[position + 1 + left]:
            left += 1
        walk.append((position, accepted, min(accepted + 1, left)))
        position += accepted + 1
    return walk, hits, totals


@pytest.fixture(scope="module")
def slow(kit: SimpleNamespace, drafter: DFlashDrafter, head: TargetHead, rows: list[Row]) -> list[Slow]:
    return [slow_figures(kit, drafter, head, row) for row in rows]


@pytest.mark.parametrize("chunk", [1, 24, 4096])
def test_a_pack_counts_what_a_slow_walk_counts(
    drafter: DFlashDrafter,
    head: TargetHead,
    rows: list[Row],
    slow: list[Slow],
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dflash_pipeline.drafter.draft.CHUNK_BLOCK_TOKENS", chunk)
    found = measure_pack(drafter, FrozenHead.of(head, drafter.fc.weight), rows)
    hits, totals = Counter[int](), Counter[int]()
    for walk, (slow_walk, row_hits, row_totals) in zip(found.walks, slow, strict=True):
        assert list(zip(walk.anchors, walk.accepted, walk.emitted, strict=True)) == slow_walk
        hits += row_hits
        totals += row_totals
    assert found.slots.hits.tolist() == [hits[slot] for slot in range(1, 8)]
    assert found.slots.totals.tolist() == [totals[slot] for slot in range(1, 8)]
    assert len({count for walk in found.walks for count in walk.accepted}) == 8  # every length occurs


@pytest.mark.parametrize("others", [0, 1, 5])
def test_accepted_runs_3_2_1_0_give_tau_two_and_a_half_in_any_batch(
    kit: SimpleNamespace, drafter: DFlashDrafter, head: TargetHead, rows: list[Row], others: int
) -> None:
    row = kit.row_with_runs(drafter, head, [5, 6, 7], [[3, 2, 1, 0]], seed=77)
    pack = [*rows[:others], row, *rows[others : 2 * others]]
    walk = measure_pack(drafter, FrozenHead.of(head, drafter.fc.weight), pack).walks[others]
    assert walk.accepted == [3, 2, 1, 0]
    assert sum(walk.accepted) / walk.verifications == 1.5
    assert walk.tokens == 10
    assert micro_tau([walk]) == macro_tau([walk]) == 2.5
    assert acceptance_rates([walk], 8) == [0.75, 0.5, 0.25, 0, 0, 0, 0]


def test_a_row_that_ends_in_accepted_drafts_emits_no_token_past_its_end(
    kit: SimpleNamespace, drafter: DFlashDrafter, head: TargetHead
) -> None:
    row = kit.row_with_runs(drafter, head, [5, 6, 7], [[2, 4]], seed=78)
    cut = Row(
        id="cut",
        tokens=row.tokens[:-1],
        loss_mask=row.loss_mask[:-1],
        states={layer: states[:-1] for layer, states in row.states.items()},
        top_ids=row.top_ids[:-1],
        top_logprobs=row.top_logprobs[:-1],
    )
    walk = measure_pack(drafter, FrozenHead.of(head, drafter.fc.weight), [cut]).walks[0]
    assert (walk.accepted, walk.emitted) == ([2, 4], [3, 4])


def test_on_policy_tokens_are_those_equal_to_the_top_1_of_the_position_before(
    kit: SimpleNamespace, drafter: DFlashDrafter, head: TargetHead
) -> None:
    row = kit.row_with_runs(drafter, head, [5, 6, 7], [[3, 2], [1, 1]], seed=79, off_policy=[3, 5])
    found = measure_pack(drafter, FrozenHead.of(head, drafter.fc.weight), [row])
    assert found.supervised == int(row.loss_mask.sum()) == 13
    assert found.on_policy == 11  # the first completed token, at position 3, counts too


def test_states_at_and_after_an_anchor_do_not_change_its_drafts(
    drafter: DFlashDrafter, head: TargetHead, rows: list[Row]
) -> None:
    row, frozen = rows[0], FrozenHead.of(head, drafter.fc.weight)
    first = row.loss_mask.tolist().index(True)
    changed = {layer: states.clone() for layer, states in row.states.items()}
    for states in changed.values():
        states[first + 3 :] += 7
    other = Row(**{**vars(row), "states": changed})
    walk, again = (measure_pack(drafter, frozen, [pack]).walks[0] for pack in (row, other))
    before = [index for index, anchor in enumerate(walk.anchors) if anchor <= first + 3]
    assert before
    assert [walk.accepted[index] for index in before] == [again.accepted[index] for index in before]


def test_a_tied_head_and_bfloat16_states_are_taken_as_they_are(
    kit: SimpleNamespace, drafter: DFlashDrafter, head: TargetHead, rows: list[Row]
) -> None:
    tied = TargetHead(embed_tokens=head.embed_tokens.bfloat16(), lm_head=None, norm=head.norm, norm_eps=1e-6)
    states = {layer: value.bfloat16() for layer, value in rows[1].states.items()}
    row = Row(**{**vars(rows[1]), "states": states})
    wide = TargetHead(embed_tokens=tied.embed_tokens.float(), lm_head=None, norm=head.norm, norm_eps=1e-6)
    slow, hits, _ = slow_figures(kit, drafter, wide, row)
    found = measure_pack(drafter, FrozenHead.of(tied, drafter.fc.weight), [row])
    assert [found.walks[0].anchors, found.walks[0].accepted] == [[a for a, _, _ in slow], [n for _, n, _ in slow]]
    assert found.slots.hits.tolist() == [hits[slot] for slot in range(1, 8)]


def test_full_logits_never_exist(
    drafter: DFlashDrafter, head: TargetHead, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_pipeline.drafter.draft.HEAD_CHUNK_LOGITS", 5 * 90)
    monkeypatch.setattr("dflash_pipeline.evaluate.ranks.NUM_COMMON", 40)
    largest = 0
    linear = torch.nn.functional.linear

    def watched(states: torch.Tensor, weight: torch.Tensor, *args: torch.Tensor | None) -> torch.Tensor:
        nonlocal largest
        result = linear(states, weight, *args)
        if weight.shape[0] == 90:
            largest = max(largest, result.numel())
        return result

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    measure_pack(drafter, FrozenHead.of(head, drafter.fc.weight), rows, [4])
    assert 0 < largest <= 5 * 90


def slow_logits(kit: SimpleNamespace, model: DFlashDrafter, head: TargetHead, row: Row, anchor: int) -> torch.Tensor:
    """[B-1, V] of one block."""
    return kit.slow_logits(model, head, row.states, anchor, int(row.tokens[anchor]))


@pytest.mark.parametrize("seed", range(3))
def test_top_m_and_tree_walks_equal_slow_ones(
    kit: SimpleNamespace, drafter: DFlashDrafter, head: TargetHead, seed: int
) -> None:
    rows = kit.many_rows(drafter, head, count=4, seed=seed)
    chooser = random.Random(seed)
    for row in rows:  # some tokens that are not the first choice but a near one
        first = row.loss_mask.tolist().index(True)
        for position in range(first + 1, len(row.tokens)):
            if row.loss_mask[position - 1] and row.loss_mask[position] and chooser.random() < 0.5:
                logits = slow_logits(kit, drafter, head, row, position - 1)
                row.tokens[position] = int(logits[0].topk(12).indices[chooser.randrange(12)])
    budgets = (0, 1, 3, 8, 24)
    found = measure_pack(drafter, FrozenHead.of(head, drafter.fc.weight), rows, budgets)
    seen = Counter[tuple[str, int, int]]()
    for index, row in enumerate(rows):
        tokens, mask = row.tokens.tolist(), [*row.loss_mask.tolist(), False]
        for kind, size in [("m", m) for m in TOP_M] + [("tree", budget) for budget in budgets]:
            expected, position = [], 0
            while position < len(tokens):
                if not (mask[position] and mask[position + 1]):
                    position += 1
                    continue
                logits = slow_logits(kit, drafter, head, row, position)
                left = mask[position + 1 :].index(False)
                own = tokens[position + 1 : position + 1 + min(left, 7)]
                accepted = 0
                if kind == "m":
                    while accepted < len(own) and own[accepted] in logits[accepted].topk(size).indices:
                        accepted += 1
                else:
                    tree, node = grow_tree(logits, size), -1
                    while accepted < len(own) and (node, own[accepted]) in zip(tree.parents, tree.tokens, strict=True):
                        node = list(zip(tree.parents, tree.tokens, strict=True)).index((node, own[accepted]))
                        accepted += 1
                expected.append((position, accepted))
                position += accepted + 1
            walk = (found.top_m_walks if kind == "m" else found.tree_walks)[size][index]
            assert list(zip(walk.anchors, walk.accepted, strict=True)) == expected
            seen.update((kind, size, accepted) for _, accepted in expected)
    assert found.tree_walks[0][0].tau == 1.0
    assert len({accepted for kind, size, accepted in seen if (kind, size) == ("m", 8)}) > 2
    assert len({accepted for kind, size, accepted in seen if (kind, size) == ("tree", 24)}) > 2
