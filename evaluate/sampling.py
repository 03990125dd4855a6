"""Speculative sampling: drafts verified so that what is emitted follows the target's distribution exactly.

A draft x of slot k, drawn from q_k, is accepted with probability min(1, p_k(x) / q_k(x)); the first one refused is
replaced by a draw from max(p_k - q_k, 0), normalised. Source: arXiv 2211.17192 and arXiv 2302.01318.

Axes: n drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sample(probabilities: Tensor, source: torch.Generator) -> int:
    """Draw a token from probabilities [V], which need not sum to 1. `source` lives on the CPU, so do the draws."""
    return int(torch.multinomial(probabilities.float().cpu(), 1, generator=source))


def verify_sampled(target: Tensor, drafter: Tensor, drafts: Sequence[int], source: torch.Generator) -> tuple[int, int]:
    """Return how many drafts are accepted and the token that follows them.

    target: [n + 1, V], the target's probabilities after the anchor and after each draft. drafter: [n, V], those that
    the drafts were drawn from. The tokens emitted, accepted drafts and the one after, are distributed as if the
    target alone had drawn them.
    """
    for slot, draft in enumerate(drafts):
        wanted, guessed = float(target[slot, draft]), float(drafter[slot, draft])
        if float(torch.rand((), generator=source)) * guessed < wanted:
            continue
        rest = (target[slot].to(drafter) - drafter[slot]).clamp(min=0)
        if not bool(rest.sum() > 0):  # equal but for rounding: refusing was an accident of it
            rest = target[slot]
        return slot, sample(rest, source)
    return len(drafts), sample(target[len(drafts)], source)
