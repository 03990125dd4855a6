"""A row of the cache, whole, as torch tensors on the CPU.

T tokens, K top tokens, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One row in and out.

    Attributes:
        id: the row's id, unique in the cache.
        tokens: [T] int32.
        loss_mask: [T] bool, true on the tokens of the target's replies.
        states: layer id -> [T, H] bfloat16 or float32, the layer's output.
        top_ids: [T, K] int32, the target's K most likely next tokens after each position, best first.
        top_logprobs: [T, K] float32, their log probabilities.
        final: [T, H] state before the final norm, or None where it is not kept or not asked for.

    A row read with `top_k=False` has K = 0.
    """

    id: str
    tokens: Tensor
    loss_mask: Tensor
    states: dict[int, Tensor]
    top_ids: Tensor
    top_logprobs: Tensor
    final: Tensor | None = None
