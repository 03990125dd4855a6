"""AdamW with the learning rate of a run: linear warmup, then a cosine down to zero at the last step."""

from __future__ import annotations

import math

import torch
from torch import nn

from .config import ResolvedConfig


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
