"""A row of the cache, whole, as torch tensors on the CPU.

T tokens, K top tokens, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .decode import Array

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


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


def as_stored(states: Tensor) -> Array:
    """Return states as numpy stores them: bfloat16 as its uint16 bit pattern."""
    if states.dtype == torch.bfloat16:
        states = states.view(torch.uint16)
    stored: Array = states.contiguous().numpy()
    return stored


def as_states(stored: Array, dtype: str) -> Tensor:
    """Return stored states as a tensor: the inverse of `as_stored`, without a copy."""
    tensor = torch.from_numpy(stored)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
