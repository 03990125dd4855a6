"""The weight that the final norm really multiplies is found by running it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from dflash_pipeline.errors import TargetError
from dflash_pipeline.target.norm import effective_norm

H = 48
CONFIG = SimpleNamespace(rms_norm_eps=1e-6)


class Plain(nn.Module):
    """w * normalised, epsilon only in the configuration."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(H).uniform_(0.3, 3.0))
        self.hidden_eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normal = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.hidden_eps)
        return (self.multiplier() * normal).to(x.dtype)

    def multiplier(self) -> Tensor:
        return self.weight.float()


class OnePlus(Plain):
    def multiplier(self) -> Tensor:
        return 1.0 + self.weight.float()


class Exponential(Plain):
    def multiplier(self) -> Tensor:
        return self.weight.float().exp()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Plain, OnePlus, Exponential])
def test_the_effective_weight_is_found_whatever_the_module_is_called(kind: type[Plain], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = kind().to(dtype)
    found = effective_norm(module, H, CONFIG)
    assert found.eps == 1e-6
    assert found.weight.dtype == torch.float32
    assert torch.allclose(found.weight, module.multiplier(), rtol=1e-5)
    if kind is not Exponential:
        assert torch.equal(found.weight, module.multiplier())
    x = torch.randn(5, H)
    assert torch.allclose(found(x), module.float()(x), rtol=1e-4, atol=1e-5)


def test_the_modules_own_epsilon_goes_before_the_configurations() -> None:
    norm = nn.RMSNorm(H, eps=1e-3)
    assert effective_norm(norm, H, CONFIG).eps == 1e-3


def test_an_unknown_epsilon_is_refused() -> None:
    with pytest.raises(TargetError, match="not an RMSNorm"):
        effective_norm(Plain(eps=1e-3), H, CONFIG)


def test_a_layer_norm_is_refused() -> None:
    with pytest.raises(TargetError, match="LayerNorm is not an RMSNorm"):
        effective_norm(nn.LayerNorm(H, eps=1e-6), H, CONFIG)


def test_a_module_that_fails_or_reshapes_is_refused() -> None:
    with pytest.raises(TargetError, match="fails on a plain tensor"):
        effective_norm(nn.RMSNorm(H + 1, eps=1e-6), H, CONFIG)
    with pytest.raises(TargetError, match="changes the shape"):
        effective_norm(nn.Linear(H, H + 1), H, CONFIG)


def test_the_module_itself_stays_as_it_was() -> None:
    norm = nn.RMSNorm(H, eps=1e-6).to(torch.bfloat16)
    effective_norm(norm, H, CONFIG)
    assert norm.weight.dtype == torch.bfloat16
