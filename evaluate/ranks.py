"""Where a row's own token stands among the drafter's choices, without the whole head wherever that can be avoided.

Per-slot accuracy and tau ask only whether the own token is the first choice, top-m tau whether it is among the first
eight. Most are not, and a few thousand common tokens show it: where enough of them are clearly better, the other
tokens cannot matter. Only the slots still in doubt go through the whole head, and what that says counts, so the result
is that of the whole head everywhere (test).

Axes: A anchors, S = B-1 slots, N states, V vocabulary, C common tokens, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..drafter.draft import head_chunks

MAX_RANK = 8
"""Ranks of MAX_RANK and more are not told apart."""
NUM_COMMON = 2048
CLEARLY = 1e-3
"""A logit is clearly better by this much of the own one's size (at least of 1): far more than rounding."""


def common_tokens(tokens: Tensor) -> Tensor:
    """Return the most frequent ids of `tokens` [T], at most NUM_COMMON."""
    counts = torch.bincount(tokens)
    ids = counts.argsort(descending=True, stable=True)[:NUM_COMMON]
    return ids[counts[ids] > 0]


def token_ranks(hidden: Tensor, wanted: Tensor, head_weight: Tensor, common: Tensor) -> Tensor:
    """Return [A, S] int64, on the CPU: how many tokens the drafter puts before the own one, equal logits by id.

    At most MAX_RANK, which also stands where nothing is wanted. A rank from 1 on is exact only where all earlier slots
    of its block have ranks below MAX_RANK: no figure asks for more.

    Args:
        hidden: [A, S, H] the drafter's final states of the slots.
        wanted: [A, S] int64 on the CPU, the own tokens, -1 for none.
        head_weight: [V, H] in the dtype of `hidden`.
        common: [C] ids to look at first.
    """
    ranks = torch.full(wanted.shape, MAX_RANK)
    alive = torch.ones(len(wanted), dtype=torch.bool)
    common_weight = head_weight[common.to(head_weight.device)]
    for slot in range(wanted.shape[1]):
        places = (wanted[:, slot] >= 0).nonzero()[:, 0]
        enough = torch.where(alive[places], MAX_RANK, 1)
        states, own = hidden[places.to(hidden.device), slot], wanted[places, slot].to(hidden.device)
        better = _clearly_better(states, own, head_weight, common_weight)
        doubtful = (better < enough).nonzero()[:, 0]
        at = doubtful.to(hidden.device)
        ranks[places[doubtful], slot] = _exact_ranks(states[at], own[at], head_weight)
        alive &= ranks[:, slot] < MAX_RANK
    return ranks


def _clearly_better(states: Tensor, own: Tensor, head_weight: Tensor, common_weight: Tensor) -> Tensor:
    """Return [N] on the CPU: how many common tokens have a clearly larger logit than the own one."""
    own_logits = (states * head_weight[own]).sum(-1, keepdim=True)
    bar = own_logits + CLEARLY * own_logits.abs().clamp(min=1)
    return (nn.functional.linear(states, common_weight) > bar).sum(-1).cpu()


def _exact_ranks(states: Tensor, own: Tensor, head_weight: Tensor) -> Tensor:
    """Return [N] on the CPU: the ranks by the whole head, at most MAX_RANK."""
    ranks = torch.empty(len(states), dtype=torch.int64)
    ids = torch.arange(head_weight.shape[0], device=states.device)
    for part, logits in head_chunks(states, head_weight):
        mine = own[part, None]
        own_logits = logits.gather(1, mine)
        before = (logits > own_logits).sum(1) + ((logits == own_logits) & (ids < mine)).sum(1)
        ranks[part] = before.clamp(max=MAX_RANK).cpu()
    return ranks
