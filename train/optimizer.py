"""AdamW with the learning rate of a run: linear warmup, then a cosine down to zero at the last step.

`fc` alone is stepped in units of its input channels. Channels of a hidden state differ in RMS by factors of
thousands, and Adam moves every weight by about the learning rate: without units, the few loudest channels would be
shaken out of all proportion, and their gradient would take all of the clipped norm.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..drafter.model import DFlashDrafter
from .config import ResolvedConfig
from .parallel import local, placed_like, whole

MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(step: int, config: ResolvedConfig) -> float:
    """Return the rate of a 0-based step."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))


def build_optimizer(model: nn.Module, config: ResolvedConfig) -> torch.optim.AdamW:
    """Return AdamW over all parameters; weight decay touches matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.recipe.beta1, config.recipe.beta2), fused=True)


def channel_scale(channel_rms: Tensor) -> Tensor:
    """Return the unit [C] of each context channel: its RMS over the cache, 1 where that is zero."""
    return torch.where(channel_rms > 0, channel_rms, torch.ones_like(channel_rms))


@torch.no_grad()
def step_in_channel_units(
    optimizer: torch.optim.Optimizer, model: DFlashDrafter, scale: Tensor, grad_clip: float
) -> float:
    """Clip the gradient and step, both as if fc read its channels divided by `scale` [C]; return the norm.

    With x = scale * u and W = V / scale, W x = V u: the gradient by V is that by W over scale, and a move of V moves W
    by that over scale. Adam's own moments are blind to a constant factor, so nothing else changes. fc may be sharded
    over its rows: its columns are whole on every rank.
    """
    assert model.fc.weight.grad is not None
    local(model.fc.weight.grad).div_(scale)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    weight = local(model.fc.weight.detach())
    before = weight.clone()
    optimizer.step()
    weight.copy_(before + (weight - before) / scale)
    return float(whole(norm))


def whole_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return `<parameter>.exp_avg` and `.exp_avg_sq` of every parameter; with shards, every rank must call this."""
    return {
        f"{name}.{moment}": whole(optimizer.state[parameter][moment]).contiguous()
        for name, parameter in model.named_parameters()
        for moment in MOMENTS
    }


def restore_moments(optimizer: torch.optim.Optimizer, model: nn.Module, step: int, moments: dict[str, Tensor]) -> None:
    """Put saved moments into the optimiser of a model, sharded as its parameters are."""
    for name, parameter in model.named_parameters():
        state: dict[str, Tensor] = {"step": torch.tensor(float(step))}
        state |= {moment: placed_like(moments[f"{name}.{moment}"], parameter) for moment in MOMENTS}
        optimizer.state[parameter] = state
