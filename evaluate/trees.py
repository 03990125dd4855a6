"""Trees of drafts (DDTree, arXiv 2604.12989): the most likely prefixes within a budget of nodes, best first.

A drafter gives each slot its own distribution, so a prefix's joint probability is the product of its tokens'. It never
rises from a prefix to a longer one; hence the n most likely prefixes form a tree, and the tree of a smaller budget is
its beginning.

Axes: S slots, M tokens kept of each slot, V vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..errors import ConfigError

MAX_BUDGET = 4096


class Node(NamedTuple):
    """A node in the order of its tree: its parent's place (-1: the anchor), its slot, its token's rank there."""

    parent: int
    slot: int
    rank: int
    log_probability: float


@dataclass(frozen=True)
class Tree:
    """Drafts to verify in one step: token ids, and for each the place of its parent, -1 for the anchor."""

    tokens: list[int]
    parents: list[int]

    @property
    def is_chain(self) -> bool:
        """Whether every token follows the one before it."""
        return self.parents == list(range(-1, len(self.parents) - 1))


def check_budgets(budgets: Sequence[int]) -> tuple[int, ...]:
    """Return the budgets, each once, in ascending order. ConfigError for one below 0 or above MAX_BUDGET."""
    for budget in budgets:
        if not 0 <= budget <= MAX_BUDGET:
            raise ConfigError(f"tree budget {budget}: expected 0 to {MAX_BUDGET} nodes")
    return tuple(sorted(set(budgets)))


def best_first(log_probabilities: Sequence[Sequence[float]]) -> Iterator[Node]:
    """Yield the prefixes of the slots' tokens by falling joint probability, a parent before its children.

    log_probabilities: [S][M], each slot's most likely first. Prefixes of equal probability come in the order in which
    they were reached. Costs one heap operation or two a node.
    """
    heap: list[tuple[float, int, int, int, int]] = []  # (-joint, serial, parent's place, slot, rank)
    serial = 0

    def push(joint: float, parent: int, slot: int, rank: int) -> None:
        nonlocal serial
        if slot < len(log_probabilities) and rank < len(log_probabilities[slot]):
            heapq.heappush(heap, (-(joint + log_probabilities[slot][rank]), serial, parent, slot, rank))
            serial += 1

    push(0.0, -1, 0, 0)
    place = 0
    while heap:
        negative, _, parent, slot, rank = heapq.heappop(heap)
        yield Node(parent, slot, rank, -negative)
        push(-negative, place, slot + 1, 0)
        push(-negative - log_probabilities[slot][rank], parent, slot, rank + 1)
        place += 1


def top_tokens(logits: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """Return ids and log probabilities [S, M] of each slot's most likely tokens, best first, from logits [S, V].

    A tree of `budget` nodes never uses more than so many tokens of a slot.
    """
    values, ids = logits.topk(min(max(budget, 1), logits.shape[-1]), dim=-1)
    return ids, (values - logits.logsumexp(-1, keepdim=True)).double()


def grow_tree(logits: Tensor, budget: int) -> Tree:
    """Return the tree of at most `budget` nodes with the largest sum of joint probabilities. logits: [S, V]."""
    tokens: list[int] = []
    parents: list[int] = []
    if budget > 0 and len(logits):
        ids, values = top_tokens(logits.float(), budget)
        names = ids.tolist()
        for node in best_first(values.tolist()):
            tokens.append(names[node.slot][node.rank])
            parents.append(node.parent)
            if len(tokens) == budget:
                break
    return Tree(tokens, parents)


def path_places(log_probabilities: Sequence[Sequence[float]], ranks: Sequence[int], budget: int) -> list[int]:
    """Return where in the best-first order the prefixes of one continuation stand, as far as they are among `budget`.

    ranks: of the continuation's tokens in their slots, an absent token's any number of M or more; the list may be
    shorter than S. The tree of n nodes accepts as many of its tokens as there are places below n.
    """
    places: list[int] = []
    last = -1  # the place of the continuation's deepest prefix so far
    for place, node in enumerate(best_first(log_probabilities)):
        if place >= budget or len(places) == len(ranks):
            break
        if node.slot == len(places) and node.parent == last and node.rank == ranks[node.slot]:
            places.append(place)
            last = place
    return places
