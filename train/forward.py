"""From states to the loss of a pack, a few blocks at a time.

Blocks depend on each other only through the context's keys and values. So forward and backward run chunk by chunk, and
the gradients by those keys and values are summed before they go through the context: the same gradient, with the
activations of one chunk of blocks in memory instead of all, and nothing computed twice.

Axes: T tokens of the pack, A anchors, B block, N supervised slots, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..drafter.model import DFlashDrafter
from .loss import weighted_loss
from .step import StepInput

CHUNK_BLOCK_TOKENS = {"cpu": 512, "cuda": 8192}
"""Block tokens whose activations exist at once, by kind of device."""

ChunkLoss = Callable[[list[Tensor]], Iterator[tuple[Tensor, Tensor]]]
"""From the context's keys and values, in turn, to each chunk's loss and hits."""


class TrainingForward(nn.Module):
    """The drafter and its loss in one call, as wrappers for many devices want it.

    precision: float32 or bfloat16 (autocast; the loss itself is computed in the head's dtype and summed in float32).
    """

    def __init__(
        self, model: DFlashDrafter, *, precision: str = "float32", kl_weight: float = 0.0, kl_temperature: float = 1.0
    ) -> None:
        super().__init__()
        self.model = model
        self._precision = precision
        self._kl_weight = kl_weight
        self._kl_temperature = kl_temperature

    def forward(self, given: StepInput, embed_VH: Tensor, head_VH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the loss over the supervised slots, differentiable once, and hits [N] bool.

        `embed_VH` and `head_VH` are the target's, the head in the dtype that its products shall be computed in. The
        caller divides by the weights of the whole step.
        """
        with self._autocast(given):
            context = self.model.context_features(given.states_TC)
            key_values = self.model.context_key_values(context, given.layout.positions)
        flat = [tensor for pair in key_values for tensor in pair]

        def chunks(context: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
            return self._chunks(given, embed_VH, head_VH, context)

        trained = [p for part in (self.model.layers, self.model.norm) for p in part.parameters()]
        loss, hits = _SumOfChunks.apply(chunks, len(flat), *flat, *trained)  # type: ignore[no-untyped-call]
        return loss, hits

    def _chunks(
        self, given: StepInput, embed_VH: Tensor, head_VH: Tensor, context: list[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        layout, size = given.layout, self.model.config.block_size
        pairs = list(zip(context[::2], context[1::2], strict=True))
        per_chunk = max(1, CHUNK_BLOCK_TOKENS[given.states_TC.device.type] // size)
        for first in range(0, max(1, layout.num_anchors), per_chunk):
            part = slice(first, first + per_chunk)
            chunk = layout.part(part)
            low, high = first * size, (first + chunk.num_anchors) * size
            slots = slice(*torch.searchsorted(given.slots_N, given.slots_N.new_tensor([low, high])).tolist())
            with self._autocast(given):
                embeds = F.embedding(given.block_tokens_AB[part].flatten(), embed_VH)
                hidden = self.model.blocks(embeds, pairs, chunk)
            yield weighted_loss(
                hidden[given.slots_N[slots] - low].float(),
                head_VH,
                given.labels_N[slots],
                given.weights_N[slots],
                teacher_NH=None if given.teacher_NH is None else given.teacher_NH[slots],
                kl_weight=self._kl_weight,
                kl_temperature=self._kl_temperature,
            )

    def _autocast(self, given: StepInput) -> torch.autocast:
        return torch.autocast(given.states_TC.device.type, torch.bfloat16, enabled=self._precision == "bfloat16")


class _SumOfChunks(torch.autograd.Function):
    """The sum of chunks' losses; their gradients are computed in the forward pass, while each chunk exists."""

    @staticmethod
    def forward(ctx: Any, chunks: ChunkLoss, num_context: int, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        context = [tensor.detach().requires_grad_() for tensor in inputs[:num_context]]
        sources = [*context, *inputs[num_context:]]
        total, hits, sums = None, [], None
        with torch.enable_grad():
            for loss, right in chunks(context):
                grads = torch.autograd.grad(loss, sources, materialize_grads=True)
                total = loss.detach() if total is None else total + loss.detach()
                sums = list(grads) if sums is None else [a.add_(b) for a, b in zip(sums, grads, strict=True)]
                hits.append(right)
                del loss, grads
        assert total is not None
        hits_N = torch.cat(hits)
        ctx.sums = sums
        ctx.mark_non_differentiable(hits_N)
        return total, hits_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        sums, ctx.sums = ctx.sums, None  # scaled in place: there is no second backward
        return (None, None, *(tensor.mul_(grads[0].to(tensor.dtype)) for tensor in sums))
