"""Speculative sampling emits what the target alone would emit: chi-square tests on a small vocabulary."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from dflash_pipeline.evaluate.sampling import sample, verify_sampled

VOCAB, DRAFTS, RUNS = 5, 2, 20_000
CRITICAL_24 = 51.2  # chi-square, 24 degrees of freedom, 0.1%


def distributions(seed: int, sharpness: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's probabilities after each possible history of up to two tokens, and the drafter's per slot."""
    generator = torch.Generator().manual_seed(seed)
    target = (torch.randn(1 + VOCAB + VOCAB**2, VOCAB, generator=generator) * sharpness).softmax(-1)
    drafter = (torch.randn(DRAFTS, VOCAB, generator=generator) * sharpness).softmax(-1)
    return target, drafter


def rows_after(drafts: list[int]) -> list[int]:
    """Where the distributions after nothing, after the first draft, and after both lie."""
    return [0, 1 + drafts[0], 1 + VOCAB + drafts[0] * VOCAB + drafts[1]]


def chi_square(counts: Counter[tuple[int, int]], target: torch.Tensor, total: int) -> float:
    result = 0.0
    for first in range(VOCAB):
        for second in range(VOCAB):
            expected = total * float(target[0, first] * target[1 + first, second])
            result += (counts[first, second] - expected) ** 2 / expected
    return result


@pytest.mark.parametrize(("seed", "sharpness"), [(0, 0.5), (1, 1.5)])
def test_the_first_two_tokens_have_the_targets_joint_distribution(seed: int, sharpness: float) -> None:
    target, drafter = distributions(seed, sharpness)
    source = torch.Generator().manual_seed(seed + 100)
    counts: Counter[tuple[int, int]] = Counter()
    lengths: Counter[int] = Counter()
    for _ in range(RUNS):
        drafts = [sample(guess, source) for guess in drafter]
        accepted, following = verify_sampled(target[rows_after(drafts)], drafter, drafts, source)
        emitted = [*drafts[:accepted], following]
        lengths[accepted] += 1
        if len(emitted) == 1:
            emitted.append(sample(target[1 + emitted[0]], source))  # what the next step's target would draw
        counts[emitted[0], emitted[1]] += 1
    assert min(lengths.values()) > 500  # every way through the rule was taken
    assert chi_square(counts, target, RUNS) < CRITICAL_24


def test_the_test_finds_a_rule_that_keeps_too_much() -> None:
    target, drafter = distributions(1, 1.5)
    source = torch.Generator().manual_seed(7)
    counts: Counter[tuple[int, int]] = Counter()
    for _ in range(RUNS):
        first = sample(drafter[0], source)
        if float(torch.rand((), generator=source)) * float(drafter[0, first]) >= float(target[0, first]):
            first = sample(target[0], source)  # wrong: the rest of the target's distribution is what is owed
        counts[first, sample(target[1 + first], source)] += 1
    assert chi_square(counts, target, RUNS) > CRITICAL_24


def test_a_drafter_equal_to_the_target_is_always_accepted() -> None:
    target = distributions(2, 1.0)[0][:3]
    source = torch.Generator().manual_seed(1)
    for _ in range(200):
        drafts = [sample(guess, source) for guess in target[:2]]
        assert verify_sampled(target, target[:2], drafts, source)[0] == 2


def test_a_token_that_the_target_never_writes_is_never_emitted() -> None:
    target = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    drafter = torch.tensor([[0.0, 0.0, 1.0]])
    source = torch.Generator().manual_seed(1)
    found = {verify_sampled(target, drafter, [2], source) for _ in range(100)}
    assert found == {(0, 0), (0, 1)}
