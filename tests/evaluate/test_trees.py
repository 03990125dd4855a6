"""The best-first tree is the best of its size, and what a tree accepts is what its nodes say."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_pipeline.errors import ConfigError
from dflash_pipeline.evaluate.trees import Tree, best_first, check_budgets, grow_tree, path_places


def random_logits(seed: int, slots: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sharpness = torch.rand((slots, 1), generator=generator) * 4
    return torch.randn(slots, vocab, generator=generator) * sharpness


def joint(logits: torch.Tensor, tree: Tree) -> float:
    """The sum of the joint probabilities of a tree's nodes."""
    probabilities = logits.double().softmax(-1)
    found: list[float] = []
    depths: list[int] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        found.append(float(probabilities[depths[-1], token]) * (1.0 if parent < 0 else found[parent]))
    return sum(found)


def best_sum_of_any_tree(logits: torch.Tensor, budget: int) -> float:
    """Brute force: every set of `budget` prefixes that holds each member's parent."""
    probabilities = logits.double().softmax(-1)
    slots, vocab = logits.shape
    prefixes = [p for depth in range(1, slots + 1) for p in itertools.product(range(vocab), repeat=depth)]
    weight = {p: math.prod(float(probabilities[slot, token]) for slot, token in enumerate(p)) for p in prefixes}
    best = 0.0
    for chosen in itertools.combinations(prefixes, min(budget, len(prefixes))):
        names = set(chosen)
        if all(len(p) == 1 or p[:-1] in names for p in chosen):
            best = max(best, sum(weight[p] for p in chosen))
    return best


@pytest.mark.parametrize(("slots", "vocab", "most"), [(2, 3, 6), (3, 2, 6), (1, 5, 5)])
@pytest.mark.parametrize("seed", range(6))
def test_no_tree_of_the_same_size_has_a_larger_sum(seed: int, slots: int, vocab: int, most: int) -> None:
    logits = random_logits(seed, slots, vocab)
    for budget in range(1, most + 1):
        tree = grow_tree(logits, budget)
        assert len(tree.tokens) == budget
        assert joint(logits, tree) == pytest.approx(best_sum_of_any_tree(logits, budget), rel=1e-6)


@given(st.integers(0, 10_000), st.integers(1, 7), st.integers(2, 9), st.integers(1, 40))
def test_a_tree_is_a_tree_and_a_smaller_one_is_its_beginning(seed: int, slots: int, vocab: int, budget: int) -> None:
    logits = random_logits(seed, slots, vocab)
    tree, smaller = grow_tree(logits, budget), grow_tree(logits, budget - 1)
    assert tree.tokens[: len(smaller.tokens)] == smaller.tokens
    assert tree.parents[: len(smaller.parents)] == smaller.parents
    assert all(-1 <= parent < place for place, parent in enumerate(tree.parents))
    assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree.tokens)  # siblings differ
    assert len(tree.tokens) == min(budget, sum(vocab**depth for depth in range(1, slots + 1)))


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(2, 6))
def test_places_of_a_continuation_are_those_found_by_walking_the_tree(seed: int, slots: int, vocab: int) -> None:
    logits = random_logits(seed, slots, vocab)
    values, order = logits.double().log_softmax(-1).sort(descending=True)
    chooser = random.Random(seed)
    ranks = [chooser.choice([0, 0, 0, 1, vocab - 1]) for _ in range(chooser.randint(1, slots))]
    tokens = [int(order[slot, rank]) for slot, rank in enumerate(ranks)]
    accepted_before = 0
    for budget in range(60):
        tree = grow_tree(logits, budget)
        names = {-1: ()}
        for place, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            names[place] = (*names[parent], token)
        prefixes = set(names.values())
        accepted = 0
        while accepted < len(tokens) and tuple(tokens[: accepted + 1]) in prefixes:
            accepted += 1
        places = path_places(values.tolist(), ranks, budget)
        assert len(places) == accepted
        assert accepted >= accepted_before  # a larger budget never accepts less
        accepted_before = accepted
    assert path_places(values.tolist(), ranks, 0) == []


def test_a_tree_of_no_nodes_and_a_greedy_chain() -> None:
    logits = torch.full((4, 5), -20.0)
    logits[range(4), [3, 1, 4, 1]] = 20.0
    assert grow_tree(logits, 0) == Tree([], [])
    tree = grow_tree(logits, 4)
    assert tree == Tree([3, 1, 4, 1], [-1, 0, 1, 2])
    assert tree.is_chain
    assert not grow_tree(logits, 5).is_chain


def test_nodes_come_by_falling_probability() -> None:
    nodes = list(best_first(random_logits(1, 3, 4).log_softmax(-1).sort(descending=True).values.tolist()))
    assert len(nodes) == 4 + 16 + 64
    assert all(a.log_probability >= b.log_probability for a, b in itertools.pairwise(nodes))


def test_budgets_are_checked() -> None:
    assert check_budgets([64, 8, 8, 0]) == (0, 8, 64)
    with pytest.raises(ConfigError, match="tree budget -1"):
        check_budgets([-1])
