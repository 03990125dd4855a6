"""One forward of the target over a batch: the chosen layers' states and the target's most likely next tokens.

R rows, T tokens (padded on the right), H hidden, V vocabulary, K top choices, N = R * T positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .parts import Parts
from .selftest import layer_output

if TYPE_CHECKING:
    from .loading import Target

LOGIT_BUDGET = 2**26  # values of one chunk's logits: 256 MiB in float32
MAX_HEAD_CHUNK_TOKENS = 1024
EXTRA_CHOICES = 8
CPU_BLOCK_VALUES = 2**20


@dataclass(frozen=True)
class Capture:
    """What one batch yields, on the CPU. Positions at and after a row's length are padding and mean nothing."""

    states: dict[int, Tensor]  # layer id -> [R, T, H], the target's dtype
    top_ids: Tensor  # [R, T, K] int32, most likely first, equal values by ascending id
    top_logprobs: Tensor  # [R, T, K] float32
    final: Tensor | None  # [R, T, H], the last layer's output before the norm


@torch.no_grad()
def capture(
    target: Target,
    input_ids: Tensor,
    lengths: Sequence[int],
    *,
    layer_ids: Sequence[int],
    top_k: int,
    keep_final: bool = False,
    head_chunk_tokens: int | None = None,
) -> Capture:
    """Run the target once over a right-padded batch and return states and top choices.

    The body runs without its head; the head is applied to a chunk of positions at a time, so that logits of a long
    batch never exist at once. Costs about 5% more CPU time than the bare forward with its logits (SmolLM2-135M, five
    layers, K = 8, float32, one core).

    Args:
        input_ids: [R, T] int64, padded on the right with any valid id.
        lengths: the number of real tokens of each row, 1 to T.
        layer_ids: decoder layers whose output is returned.
        top_k: K, at most the vocabulary.
        keep_final: also return the last layer's output.
        head_chunk_tokens: positions per application of the head; by default 1,024, less for a large vocabulary.

    Raises:
        ConfigError: lengths, layers or K do not fit the batch or the target.
    """
    _check(target, input_ids, lengths, layer_ids, top_k)
    ids = input_ids.to(target.device)
    mask = (torch.arange(ids.shape[1])[None, :] < torch.tensor(list(lengths))[:, None]).long().to(target.device)
    last_id = target.num_layers - 1
    with captured_states(target.parts, {*layer_ids, *([last_id] if keep_final else [])}) as states:
        hidden = target.parts.base(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    top_ids, top_logprobs = _top_choices(target.parts, hidden, top_k, head_chunk_tokens)
    return Capture(
        {i: states[i].cpu() for i in layer_ids},
        top_ids.cpu(),
        top_logprobs.cpu(),
        states[last_id].cpu() if keep_final else None,
    )


@contextmanager
def captured_states(parts: Parts, layer_ids: set[int]) -> Iterator[dict[int, Tensor]]:
    """Yield a dictionary that each forward fills: layer id -> its output [R, T, H], a copy."""
    states: dict[int, Tensor] = {}
    handles = []

    def keep(layer_id: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            states[layer_id] = layer_output(output).detach().clone()  # a later layer may add to it in place

        return hook

    try:
        for layer_id in sorted(layer_ids):
            handles.append(parts.layers[layer_id].register_forward_hook(keep(layer_id)))
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _top_choices(parts: Parts, hidden: Tensor, top_k: int, chunk_tokens: int | None) -> tuple[Tensor, Tensor]:
    num_rows, num_tokens, hidden_size = hidden.shape
    flat = hidden.reshape(num_rows * num_tokens, hidden_size)
    ids, logprobs = [], []
    for chunk in flat.tensor_split(num_head_chunks(len(flat), parts.head_weight.shape[0], chunk_tokens)):
        logits = parts.lm_head(chunk)
        chosen, values = top_choices(logits, top_k)
        ids.append(chosen.int())
        logprobs.append(values.float() - _normaliser(logits))
    shape = (num_rows, num_tokens, top_k)
    return torch.cat(ids).reshape(shape), torch.cat(logprobs).reshape(shape)


def _normaliser(logits: Tensor) -> Tensor:
    """Return logsumexp [N, 1] of logits [N, V] in float32.

    On a CPU a few rows at a time, which stays in the cache: half the time in float32, a third in bfloat16.
    """
    step = max(1, CPU_BLOCK_VALUES // logits.shape[-1]) if logits.device.type == "cpu" else len(logits)
    blocks = [logits[start : start + step] for start in range(0, len(logits), step)]
    return torch.cat([torch.logsumexp(block.float(), dim=-1, keepdim=True) for block in blocks])


def num_head_chunks(num_positions: int, vocab_size: int, chunk_tokens: int | None = None) -> int:
    """Return into how many nearly equal chunks the positions of a batch are cut for the head.

    Nearly equal, because a small rest (1 to 3 positions) takes another matrix kernel on a CPU and gives other last
    bits; chunks of 4 and more gave the bits of one whole product (measured, float32 and bfloat16).
    """
    limit = chunk_tokens or max(64, min(MAX_HEAD_CHUNK_TOKENS, LOGIT_BUDGET // vocab_size))
    return max(1, -(-num_positions // limit))


def top_choices(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return ids [N, k] int64 and values [N, k] of the k largest logits of each row, equal values by ascending id.

    `torch.topk` picks among equal values as it likes. So k + 8 are selected and sorted by (-value, id), which is
    exact unless the extra ones too equal the k-th value; those rows (none in practice, and rows with NaN) are
    sorted whole. Against a bare topk this costs 2 to 6% (512 rows of 49,152 values, one core), where the head itself
    costs 14 times the topk; sorting every row whole would cost 50 to 80 times the topk.

    Args:
        logits: [N, V].
        k: 1 to V.
    """
    selected = min(logits.shape[-1], k + EXTRA_CHOICES)
    values, ids = logits.topk(selected, dim=-1)
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, by_value)
    if selected < logits.shape[-1]:
        unsure = ~(values[:, -1] < values[:, k - 1])
        if bool(unsure.any()):
            whole, order = logits[unsure].sort(dim=-1, descending=True, stable=True)
            values[unsure], ids[unsure] = whole[:, :selected], order[:, :selected]
    return ids[:, :k], values[:, :k]


def _check(target: Target, ids: Tensor, lengths: Sequence[int], layer_ids: Sequence[int], top_k: int) -> None:
    if ids.ndim != 2 or len(lengths) != ids.shape[0] or not all(1 <= n <= ids.shape[1] for n in lengths):
        raise ConfigError(f"a batch of shape {list(ids.shape)} with row lengths {list(lengths)}: they do not fit")
    if not all(0 <= i < target.num_layers for i in layer_ids):
        raise ConfigError(f"layer ids {list(layer_ids)}: the target has layers 0 to {target.num_layers - 1}")
    if not 1 <= top_k <= target.vocab_size:
        raise ConfigError(f"top-k {top_k}: expected 1 to {target.vocab_size}, the target's vocabulary")
