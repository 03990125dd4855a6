"""What one step of training is given: a pack on its device, with noise and labels.

Axes: T tokens of the pack, C = K*H context channels, A anchors, B block, N supervised slots, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..drafter.layout import PackLayout
from ..store import TargetHead
from .config import ResolvedConfig
from .data import Pack
from .noise import add_noise, noise_scale_at

LABEL_CHUNK_ROWS = 256
_LABEL_NOISE_SEED = 7_919


@dataclass(frozen=True, kw_only=True)
class StepInput:
    """A pack on its device, noise and labels applied.

    `states_TC` float32; `block_tokens_AB` int64; `slots_N` int64 flat index a * B + k of each supervised slot,
    ascending; `teacher_NH` the label states after the target's norm, where labels come from a state.
    """

    layout: PackLayout
    states_TC: Tensor
    block_tokens_AB: Tensor
    slots_N: Tensor
    labels_N: Tensor
    weights_N: Tensor
    teacher_NH: Tensor | None

    @classmethod
    def prepare(
        cls,
        pack: Pack,
        config: ResolvedConfig,
        head: TargetHead,
        step: int,
        context_rms: Tensor,
        label_rms: Tensor | None,
        device: torch.device,
    ) -> StepInput:
        """Add the recipe's noise, name the labels of a label state, and move everything to the device."""
        states_TC, label_states = noisy_states(pack, config, step, context_rms, label_rms)
        supervision, drafter = pack.supervision, config.drafter
        labels_N, teacher_NH = supervision.labels_N.to(device), None
        if label_states is not None:
            teacher_NH = normed(label_states.to(device), head)
            labels_N = most_likely(teacher_NH, head)
        block_tokens_AB = torch.full((pack.layout.num_anchors, drafter.block_size), drafter.mask_token_id)
        block_tokens_AB[:, 0] = pack.tokens_T[pack.layout.anchors]
        slots_N2 = supervision.slots_N2
        return cls(
            layout=pack.layout,
            states_TC=states_TC.to(device),
            block_tokens_AB=block_tokens_AB.to(device),
            slots_N=(slots_N2[:, 0] * drafter.block_size + slots_N2[:, 1]).to(device),
            labels_N=labels_N,
            weights_N=supervision.weights_N.to(device),
            teacher_NH=teacher_NH,
        )


def noisy_states(
    pack: Pack, config: ResolvedConfig, step: int, context_rms: Tensor, label_rms: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return context features [T, C] and label states [N, H] in float32, with the noise of this step.

    The context gets the recipe's noise; the label state gets it only where the recipe sets `noisy_labels`.
    """
    recipe = config.recipe
    states_TC = pack.states_TC.float()
    labels_NH = None if pack.label_states_NH is None else pack.label_states_NH.float()
    if recipe.noise_kind == "none":
        return states_TC, labels_NH
    scale = noise_scale_at(step, config.steps, recipe.noise_scale, recipe.noise_schedule)
    draw = step * config.packs_per_step + pack.stream
    states_TC = add_noise(states_TC, context_rms, kind=recipe.noise_kind, scale=scale, seed=recipe.seed, draw=draw)
    if recipe.noisy_labels and labels_NH is not None:
        rms = label_rms if label_rms is not None else labels_NH.square().mean(0).sqrt()
        seed = recipe.seed + _LABEL_NOISE_SEED
        labels_NH = add_noise(labels_NH, rms, kind=recipe.noise_kind, scale=scale, seed=seed, draw=draw)
    return states_TC, labels_NH


def normed(states_NH: Tensor, head: TargetHead) -> Tensor:
    """Return states after the target's final norm."""
    return F.rms_norm(states_NH, head.norm.shape, head.norm, head.norm_eps)


def most_likely(normed_NH: Tensor, head: TargetHead) -> Tensor:
    """Return the id [N] of the largest logit, int64; never more than a chunk of logits."""
    chunks = torch.split(normed_NH, LABEL_CHUNK_ROWS)
    parts = [(part @ head.head_weight.T).argmax(1) for part in chunks]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=normed_NH.device)
