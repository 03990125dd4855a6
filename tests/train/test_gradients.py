"""The fast path of a step (tiled attention, chunked head) has the gradients of the plain one, on random packs."""

from __future__ import annotations

import copy

import pytest
import torch

from dflash_pipeline.drafter.config import FULL, SLIDING, DrafterConfig
from dflash_pipeline.drafter.layout import PackLayout
from dflash_pipeline.drafter.model import DFlashDrafter, init_weights
from dflash_pipeline.train import forward, loss
from dflash_pipeline.train.forward import TrainingForward
from dflash_pipeline.train.step import StepInput

VOCAB, HIDDEN, BLOCK = 97, 64, 4
CASES = {
    "ragged rows": ([9, 1, 30, 17], [0, 3, 8, 9, 10, 25, 39, 41, 56], "FF", 2),
    "sliding layers": ([9, 1, 30, 17], [0, 3, 8, 9, 10, 25, 39, 41, 56], "SFS", 2),
    "as many key heads": ([40], [1, 2, 3, 20, 39], "FS", 4),
    "one key head": ([40], [1, 2, 3, 20, 39], "F", 1),
    "blocks cut by row ends": ([6, 6, 6], [4, 5, 10, 11, 16, 17], "FS", 2),
    "one anchor": ([12], [7], "FS", 2),
    "anchor at the start": ([12], [0], "F", 2),
}


def make(kinds: str, kv_heads: int) -> DFlashDrafter:
    config = DrafterConfig(
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_layers=len(kinds),
        num_heads=4,
        num_kv_heads=kv_heads,
        head_dim=16,
        vocab_size=VOCAB,
        block_size=BLOCK,
        mask_token_id=3,
        context_layer_ids=(1, 4),
        num_target_layers=8,
        layer_types=tuple(SLIDING if kind == "S" else FULL for kind in kinds),
        sliding_window=6 if "S" in kinds else None,
    )
    model = DFlashDrafter(config)
    init_weights(model, torch.Generator().manual_seed(1), std=0.1)
    return model


def gradients(
    case: tuple[list[int], list[int], str, int], dtype: torch.dtype, *, fast: bool
) -> dict[str, torch.Tensor | None]:
    """One step's gradients: tiles, chunks and `dtype` autocast, or dense masks and logits in float64."""
    lengths, anchors, kinds, kv_heads = case
    generator = torch.Generator().manual_seed(2)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    layout = PackLayout(offsets, torch.tensor(anchors, dtype=torch.int64))
    states = torch.randn(int(offsets[-1]), 2 * HIDDEN, generator=generator)
    embed = torch.randn(VOCAB, HIDDEN, generator=generator)
    blocks = torch.randint(VOCAB, (len(anchors), BLOCK), generator=generator)
    head = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3
    ends = offsets[layout.rows + 1]
    inside = (layout.anchors[:, None] + torch.arange(BLOCK) < ends[:, None]) & (torch.arange(BLOCK) > 0)
    slots = torch.nonzero(inside.flatten()).flatten()
    labels = torch.randint(VOCAB, (len(slots),), generator=generator)
    weights = torch.exp(-(slots % BLOCK - 1).float() / 4)
    model = make(kinds, kv_heads)
    if fast:
        given = StepInput(
            layout=layout,
            states_TC=states,
            block_tokens_AB=blocks,
            slots_N=slots,
            labels_N=labels,
            weights_N=weights,
            teacher_NH=None,
        )
        precision = str(dtype).removeprefix("torch.")
        total, _ = TrainingForward(model, precision=precision)(given, embed, head.to(dtype))
    else:
        model = copy.deepcopy(model).double()
        hidden = model(
            embed[blocks].double().flatten(0, 1), model.context_features(states.double()), layout, attention="plain"
        )
        nll = torch.nn.functional.cross_entropy(hidden[slots] @ head.double().T, labels, reduction="none")
        total = (nll * weights).sum()
    total.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of blocks, and several tiles of logits both ways, in every case but the smallest."""
    monkeypatch.setitem(forward.CHUNK_BLOCK_TOKENS, "cpu", 3 * BLOCK)
    monkeypatch.setitem(loss.TILE_BYTES, "cpu", VOCAB * 4 * 2)
    monkeypatch.setattr(loss, "MIN_TILE_COLUMNS", VOCAB // 3)


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_gradients_equal_the_plain_reference(
    case: tuple[list[int], list[int], str, int], dtype: torch.dtype, bar: float
) -> None:
    """Relative to the whole gradient: a tensor that hardly matters may be off by more in bfloat16."""
    ours, plain = gradients(case, dtype, fast=True), gradients(case, dtype, fast=False)
    found = torch.cat([value.flatten().double() for value in ours.values() if value is not None])
    expected = torch.cat([plain[name].flatten() for name, value in ours.items() if value is not None])
    assert float((found - expected).norm() / expected.norm()) < bar
    if dtype == torch.float32:
        for name, value in ours.items():
            scale = max(float(plain[name].norm()), 1e-6 * float(expected.norm()))
            assert float((value.double() - plain[name]).norm()) < bar * scale, name


def test_a_pack_without_anchors_has_no_gradient() -> None:
    ours = gradients(([12, 5], [], "FS", 2), torch.float32, fast=True)
    assert all(value is None or not bool(value.any()) for value in ours.values())
