"""The weight that a model's final norm really multiplies, found by running the module and not by its name.

Llama's RMSNorm multiplies by its weight, Qwen3.5's and Gemma's by one plus their weight, some have none. A reader of
the cache needs one plain RMSNorm, so the effective weight is solved for from the module's own output on probes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TargetError

TOLERANCE = 1e-4
EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
CONFIG_EPS_NAMES = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps")


@dataclass(frozen=True)
class EffectiveNorm:
    """A plain RMSNorm: x * rsqrt(mean(x^2) + eps) * weight, with `weight` [H] float32 on the CPU."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the norm to x [..., H]; computed and returned in float32."""
        x = x.float()
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * scale * self.weight.to(x.device)


@torch.no_grad()
def effective_norm(norm: nn.Module, hidden_size: int, text_config: Any) -> EffectiveNorm:
    """Return the plain RMSNorm that equals `norm`, verified on probes of three magnitudes.

    Where the solved weight equals the stored one, or one plus it, within rounding, that exact value is returned.

    Args:
        norm: the module between the last decoder layer and the head.
        hidden_size: H.
        text_config: the model's text configuration, asked for epsilon where the module does not say.

    Raises:
        TargetError: the module is not an RMSNorm (it subtracts a mean, adds a bias, or fails on the probe).
    """
    probe = copy.deepcopy(norm).float()
    weight = getattr(norm, "weight", None)
    device = weight.device if isinstance(weight, Tensor) else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    ones = torch.ones(1, hidden_size, device=device)
    random = torch.randn(3, hidden_size, generator=generator).to(device)
    inputs = random * torch.tensor([[1.0], [30.0], [1e-3]], device=device)  # the smallest makes epsilon count
    try:
        at_ones, outputs = probe(ones), probe(inputs)
    except Exception as error:
        raise TargetError(f"the final norm {_name(norm)} fails on a plain tensor: {error}") from error
    if at_ones.shape != ones.shape or outputs.shape != inputs.shape:
        raise TargetError(f"the final norm {_name(norm)} changes the shape of its input: not an RMSNorm")
    for eps in _candidate_eps(norm, text_config):
        found = EffectiveNorm(_exact(at_ones[0].cpu() * (1.0 + eps) ** 0.5, weight), eps)
        if _close(found(inputs), outputs):
            return found
    raise TargetError(
        f"the final norm {_name(norm)} is not an RMSNorm (a mean, a bias or an unknown epsilon is in it): a reader of "
        "the cache could not rebuild the logits; such targets are not supported"
    )


def _exact(solved: Tensor, weight: Tensor | None) -> Tensor:
    if not isinstance(weight, Tensor) or weight.shape != solved.shape:
        return solved
    stored = weight.detach().float().cpu()
    for candidate in (stored, 1.0 + stored):
        if torch.allclose(solved, candidate, rtol=1e-5, atol=1e-6):
            return candidate.clone()
    return solved


def _close(ours: Tensor, theirs: Tensor) -> bool:
    scale = theirs.float().norm(dim=-1).clamp_min(1e-30)
    return bool(((ours - theirs.float()).norm(dim=-1) / scale < TOLERANCE).all())


def _candidate_eps(norm: nn.Module, text_config: Any) -> list[float]:
    values = [getattr(norm, name, None) for name in EPS_NAMES]
    values += [getattr(text_config, name, None) for name in CONFIG_EPS_NAMES]
    found = [float(value) for value in values if isinstance(value, float | int) and not isinstance(value, bool)]
    return list(dict.fromkeys(value for value in found if value > 0))


def _name(norm: nn.Module) -> str:
    return type(norm).__name__
