"""The test that a freshly loaded target is understood: what will be cached rebuilds its own logits.

Refused here: scaled embeddings (Gemma), learned positions, states that are not handed from layer to layer, anything
between the last layer and the logits other than RMSNorm and head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TargetError
from .norm import EffectiveNorm
from .parts import Parts

NUM_HEAD_ROWS = 4096
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}


@torch.no_grad()
def check_target(model: Any, parts: Parts, norm: EffectiveNorm, token_ids: Sequence[int]) -> None:
    """Run one forward of a few tokens and check what the layers, the norm and the head do.

    The logits are compared on at most 4,096 rows of the vocabulary, spread evenly, so that the check needs no
    float32 copy of a large head.

    Raises:
        TargetError: naming what is not as the cache format needs it.
    """
    device = parts.embed_weight.device
    ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=device)
    inputs, outputs, logits = _run(model, parts, ids)
    name, dtype, shape = type(model).__name__, parts.embed_weight.dtype, (*ids.shape, parts.embed_weight.shape[1])
    for index, state in enumerate(outputs):
        if tuple(state.shape) != shape or state.dtype != dtype:
            raise TargetError(
                f"{name}: layer {index} returns {state.dtype} {list(state.shape)}, expected {dtype} {list(shape)}"
            )
    if not torch.equal(inputs[0], parts.embed_weight[ids]):
        raise TargetError(
            f"{name}: its first layer does not read the plain embeddings of the tokens (it scales its embeddings, as "
            "Gemma does, or adds positions to them); a drafter could not rebuild them, so such targets are refused"
        )
    for index in range(1, len(inputs)):
        if not torch.equal(inputs[index], outputs[index - 1]):
            raise TargetError(f"{name}: layer {index} does not read what layer {index - 1} returned; not understood")
    error = _logit_error(parts, norm, outputs[-1], logits)
    if not error <= TOLERANCE[dtype]:
        raise TargetError(
            f"{name}: norm and head applied to its last layer's state do not give its own logits (relative error "
            f"{error:.1e}, expected at most {TOLERANCE[dtype]:.0e}); something scales or caps them, or they are not "
            "finite; such targets are refused"
        )


def _logit_error(parts: Parts, norm: EffectiveNorm, last: Tensor, logits: Tensor) -> float:
    num_rows = parts.head_weight.shape[0]
    rows = torch.linspace(0, num_rows - 1, min(num_rows, NUM_HEAD_ROWS), device=last.device).long()
    ours = norm(last) @ parts.head_weight[rows].float().T
    theirs = logits[..., rows].float()
    return float((ours - theirs).norm() / theirs.norm())


def _run(model: Any, parts: Parts, ids: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append((args[0] if args else kwargs["hidden_states"]).clone())

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        outputs.append(layer_output(output).clone())

    handles = []
    try:
        for layer in parts.layers:
            handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(layer.register_forward_hook(after))
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    except TargetError:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise TargetError(
            f"{type(model).__name__} fails on its first forward: {type(error).__name__}: {first}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    if not len(inputs) == len(outputs) == len(parts.layers):
        raise TargetError(
            f"{type(model).__name__}: {len(outputs)} layer calls in one forward, expected {len(parts.layers)}"
        )
    return inputs, outputs, logits


def layer_output(output: Any) -> Tensor:
    """Return the hidden state that a decoder layer returned: a tensor, or the first entry of a tuple.

    Raises:
        TargetError: it returned neither.
    """
    state = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(state, Tensor):
        raise TargetError(f"a decoder layer returned {type(output).__name__}, expected a tensor or a tuple of them")
    return state
