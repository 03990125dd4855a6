"""Captured states are those of the live model, and top choices are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dflash_pipeline.errors import ConfigError
from dflash_pipeline.target import Target, TargetConfig, capture, load_target
from dflash_pipeline.target.capture import num_head_chunks, top_choices

LENGTHS = [70, 33, 5, 1]


def batch(lengths: list[int], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 1000, (len(lengths), max(lengths)), generator=generator)
    for row, length in enumerate(lengths):
        ids[row, length:] = 0
    return ids


def live_states(target: Target, ids: Tensor, lengths: list[int]) -> tuple[dict[int, Tensor], Tensor]:
    """An independent pass: all layer outputs and the full logits of the whole model."""
    states: dict[int, Tensor] = {}
    handles = [
        layer.register_forward_hook(
            lambda _m, _a, output, index=index: states.__setitem__(
                index, (output[0] if isinstance(output, tuple) else output).clone()
            )
        )
        for index, layer in enumerate(target.model.model.layers)
    ]
    mask = (torch.arange(ids.shape[1])[None] < torch.tensor(lengths)[:, None]).long()
    with torch.no_grad():
        logits = target.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return states, logits


@pytest.fixture(scope="module", params=["flat", "flat-bfloat16", "hybrid"])
def target(request: pytest.FixtureRequest, tiny_target: Target, tiny_hybrid: Target, tiny_target_dir: Path) -> Target:
    if request.param == "flat-bfloat16":
        return load_target(TargetConfig(name=str(tiny_target_dir), device="cpu", dtype="bfloat16"))
    return tiny_hybrid if request.param == "hybrid" else tiny_target


def test_every_layer_equals_a_forward_hook_bit_for_bit(target: Target) -> None:
    ids = batch(LENGTHS)
    found = capture(target, ids, LENGTHS, layer_ids=range(8), top_k=8, keep_final=True)
    states, _ = live_states(target, ids, LENGTHS)
    for layer_id in range(8):
        assert found.states[layer_id].dtype == target.dtype
        assert torch.equal(found.states[layer_id], states[layer_id])
    assert found.final is not None
    assert torch.equal(found.final, states[7])


def test_the_last_layers_state_through_norm_and_head_gives_the_live_logits(target: Target) -> None:
    ids = batch(LENGTHS)
    found = capture(target, ids, LENGTHS, layer_ids=(7,), top_k=1)
    _, logits = live_states(target, ids, LENGTHS)
    _, head, _, _ = target.head_tensors()
    assert head is not None
    rebuilt = target.norm(found.states[7]) @ head.float().T
    tolerance = 1e-4 if target.dtype == torch.float32 else 0.02
    assert (rebuilt - logits.float()).norm() / logits.float().norm() < tolerance


@pytest.mark.parametrize("chunk", [None, 16])
def test_top_choices_equal_the_live_logits(target: Target, chunk: int | None) -> None:
    ids = batch(LENGTHS)
    found = capture(target, ids, LENGTHS, layer_ids=(1,), top_k=8, head_chunk_tokens=chunk)
    _, logits = live_states(target, ids, LENGTHS)
    lowest_argmax = (logits == logits.max(-1, keepdim=True).values).int().argmax(-1)
    assert found.top_ids.dtype == torch.int32
    assert torch.equal(found.top_ids[..., 0].long(), lowest_argmax)
    expected = torch.log_softmax(logits.float(), -1).gather(-1, found.top_ids.long())
    assert torch.allclose(found.top_logprobs, expected, atol=1e-5)
    assert found.top_logprobs.dtype == torch.float32


def test_padding_changes_nothing_beyond_noise(target: Target) -> None:
    ids = batch(LENGTHS)
    together = capture(target, ids, LENGTHS, layer_ids=range(8), top_k=1)
    for row, length in enumerate(LENGTHS):
        alone = capture(target, ids[row : row + 1, :length], [length], layer_ids=range(8), top_k=1)
        for layer_id in range(8):
            ours, theirs = together.states[layer_id][row, :length].float(), alone.states[layer_id][0].float()
            cosine = torch.nn.functional.cosine_similarity(ours, theirs, dim=-1)
            assert cosine.min() > (0.99999 if target.dtype == torch.float32 else 0.999)


def test_what_stands_in_the_padding_does_not_matter(target: Target) -> None:
    ids = batch(LENGTHS)
    other = ids.clone()
    for row, length in enumerate(LENGTHS):
        other[row, length:] = 7
    first = capture(target, ids, LENGTHS, layer_ids=(3, 7), top_k=4)
    second = capture(target, other, LENGTHS, layer_ids=(3, 7), top_k=4)
    for row, length in enumerate(LENGTHS):
        for layer_id in (3, 7):
            assert torch.equal(first.states[layer_id][row, :length], second.states[layer_id][row, :length])
        assert torch.equal(first.top_ids[row, :length], second.top_ids[row, :length])


def test_full_logits_never_exist(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    handle = tiny_target.parts.lm_head.register_forward_hook(lambda _m, _a, output: shapes.append(tuple(output.shape)))
    try:
        capture(tiny_target, batch([900, 800]), [900, 800], layer_ids=(1,), top_k=8, head_chunk_tokens=256)
    finally:
        handle.remove()
    assert len(shapes) == 8
    assert max(shape[0] for shape in shapes) <= 256
    assert min(shape[0] for shape in shapes) >= 200  # nearly equal chunks: no small rest with other last bits


def test_the_head_chunk_shrinks_with_the_vocabulary() -> None:
    for vocab_size in (1_000, 49_152, 150_000, 248_320):
        num_chunks = num_head_chunks(100_000, vocab_size)
        assert 100_000 / num_chunks * vocab_size <= 2**26 * 1.01
    assert num_head_chunks(5, 1_000) == 1


def test_hooks_are_gone_even_after_a_failure(tiny_target: Target) -> None:
    def fail(*_args: Any) -> None:
        raise RuntimeError("broken kernel")

    handle = tiny_target.parts.layers[5].register_forward_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="broken kernel"):
            capture(tiny_target, batch([4]), [4], layer_ids=range(8), top_k=1)
    finally:
        handle.remove()
    assert all(not layer._forward_hooks for layer in tiny_target.parts.layers)


@pytest.mark.parametrize(
    ("lengths", "layer_ids", "top_k", "message"),
    [
        ([4, 4], (1,), 1, "do not fit"),
        ([0], (1,), 1, "do not fit"),
        ([5], (1,), 1, "do not fit"),
        ([4], (8,), 1, "layers 0 to 7"),
        ([4], (1,), 1025, "expected 1 to 1024"),
    ],
)
def test_what_does_not_fit_is_refused(
    tiny_target: Target, lengths: list[int], layer_ids: tuple[int, ...], top_k: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        capture(tiny_target, batch([4]), lengths, layer_ids=layer_ids, top_k=top_k)


@given(
    num_values=st.integers(1, 5),
    num_rows=st.integers(1, 4),
    size=st.integers(1, 60),
    k=st.integers(1, 12),
    seed=st.integers(0, 999),
)
def test_equal_values_go_to_the_lowest_id(num_values: int, num_rows: int, size: int, k: int, seed: int) -> None:
    k = min(k, size)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, num_values, (num_rows, size), generator=generator).to(torch.bfloat16)
    ids, values = top_choices(logits, k)
    for row in range(num_rows):
        expected = sorted(range(size), key=lambda index: (-float(logits[row, index]), index))[:k]
        assert ids[row].tolist() == expected
    assert torch.equal(values, logits.gather(-1, ids))


def test_one_value_everywhere_gives_the_first_ids() -> None:
    ids, _ = top_choices(torch.full((3, 5000), -1.5), 8)
    assert ids.tolist() == [list(range(8))] * 3
