"""Noise on context features, and on nothing else unless a recipe asks for that historical bug by name."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def noise_scale_at(step: int, steps: int, scale: float, schedule: str) -> float:
    """Return the scale at a step: constant, or falling to zero over the run linearly or as a half cosine."""
    progress = step / steps
    if schedule == "linear":
        return scale * (1 - progress)
    if schedule == "cosine":
        return scale * 0.5 * (1 + math.cos(math.pi * progress))
    return scale


def add_noise(states: Tensor, channel_rms: Tensor, *, kind: str, scale: float, seed: int, draw: int) -> Tensor:
    """Return `states` plus noise in proportion to each channel's RMS over the cache.

    Args:
        states: [T, C] float.
        channel_rms: [C] float32.
        kind: `uniform` (in -1..1) or `gaussian` (standard deviation 1), times scale and RMS.
        scale: relative size of the noise.
        seed, draw: fix the noise, so that a resumed run sees the same.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + draw)
    if kind == "uniform":
        unit = torch.rand(states.shape, generator=generator) * 2 - 1
    else:
        unit = torch.randn(states.shape, generator=generator)
    return states + (scale * channel_rms) * unit.to(states)
