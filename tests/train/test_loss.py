"""The chunked loss equals a dense float64 one, in value and gradient."""

from __future__ import annotations

import pytest
import torch

from dflash_pipeline.train import loss as loss_module
from dflash_pipeline.train.loss import weighted_loss


def dense(hidden, head, labels, weights, teacher, kl_weight, temperature):
    logits = hidden @ head.T
    hard = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    if not kl_weight:
        return (weights * hard).sum()
    p = (teacher @ head.T / temperature).softmax(1)
    log_q = (logits / temperature).log_softmax(1)
    soft = temperature**2 * (p * (p.log() - log_q)).sum(1)
    return (weights * ((1 - kl_weight) * hard + kl_weight * soft)).sum()


@pytest.mark.parametrize(("kl_weight", "temperature"), [(0.0, 1.0), (0.7, 2.0), (1.0, 1.5)])
@pytest.mark.parametrize("tile_bytes", [1, 4 * 101 * 7, 1 << 20])
def test_value_and_gradient_equal_the_dense_reference(
    kl_weight: float, temperature: float, tile_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "MIN_TILE_COLUMNS", 20)
    torch.manual_seed(1)
    hidden, head = torch.randn(23, 16, dtype=torch.float64), torch.randn(101, 16, dtype=torch.float64)
    teacher, labels, weights = torch.randn(23, 16, dtype=torch.float64), torch.randint(101, (23,)), torch.rand(23)
    reference = hidden.clone().requires_grad_()
    expected = dense(reference, head, labels, weights.double(), teacher, kl_weight, temperature)
    expected.backward()
    for dtype, bound in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        given = hidden.clone().to(dtype).requires_grad_()
        loss, hits = weighted_loss(
            given,
            head.to(dtype),
            labels,
            weights,
            teacher_NH=teacher.to(dtype) if kl_weight else None,
            kl_weight=kl_weight,
            kl_temperature=temperature,
            tile_bytes=tile_bytes,
        )
        (loss * 3).backward()
        assert abs(loss.item() - expected.item()) / abs(expected.item()) < bound
        assert float((given.grad.double() / 3 - reference.grad).norm() / reference.grad.norm()) < bound
        assert hits.tolist() == ((hidden @ head.T).argmax(1) == labels).tolist()


def test_no_supervised_slot_gives_a_zero_loss() -> None:
    hidden = torch.zeros(0, 8, requires_grad=True)
    loss, hits = weighted_loss(hidden, torch.randn(11, 8), torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    loss.backward()
    assert loss.item() == 0
    assert hits.shape == (0,)
