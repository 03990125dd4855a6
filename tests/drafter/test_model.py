from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dflash_pipeline.drafter.config import SLIDING, DrafterConfig
from dflash_pipeline.drafter.layout import PackLayout
from dflash_pipeline.drafter.model import DFlashDrafter, RMSNorm, init_from_statistics, init_weights, rotary, rotate
from dflash_pipeline.errors import ConfigError

ConfigOf = Callable[..., DrafterConfig]
DrafterOf = Callable[..., DFlashDrafter]


class ByHand:
    """The drafter written a second time, from tensor names alone: one block, loops over heads and slots."""

    def __init__(self, tensors: dict[str, Tensor], config: DrafterConfig) -> None:
        self.tensors, self.config = tensors, config

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + self.config.rms_norm_eps).sqrt() * self.tensors[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"] @ x

    def rope(self, x: Tensor, position: int) -> Tensor:
        half = self.config.head_dim // 2
        out = torch.empty_like(x)
        for i in range(half):
            frequency = self.config.rope_theta ** (-2 * i / self.config.head_dim)
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            out[i] = x[i] * cos - x[i + half] * sin
            out[i + half] = x[i + half] * cos + x[i] * sin
        return out

    def head(self, x: Tensor, part: str, layer: int, head: int, position: int) -> Tensor:
        name = f"layers.{layer}.self_attn.{part}"
        size = self.config.head_dim
        piece = self.linear(x, f"{name}_proj")[head * size : (head + 1) * size]
        return piece if part == "v" else self.rope(self.norm(piece, f"{name}_norm"), position)

    def block(self, embeds: Tensor, states: Tensor) -> Tensor:
        """Final states [B, H] of the block that stands right after `states` [a, K*H]."""
        config = self.config
        context = [self.norm(self.linear(state, "fc"), "hidden_norm") for state in states]
        slots = list(embeds)
        anchor = len(context)
        group = config.num_heads // config.num_kv_heads
        for layer in range(config.num_layers):
            normed = [self.norm(x, f"layers.{layer}.input_layernorm") for x in slots]
            keyed = list(enumerate([*context, *normed]))
            following = []
            for slot, x in enumerate(normed):
                position = anchor + slot
                heads = []
                for head in range(config.num_heads):
                    query = self.head(x, "q", layer, head, position)
                    seen = keyed
                    if config.layer_types[layer] == SLIDING:
                        assert config.sliding_window is not None
                        seen = [(p, k) for p, k in keyed if p <= position and position - p < config.sliding_window]
                    scores = [query @ self.head(k, "k", layer, head // group, p) for p, k in seen]
                    weights = (torch.stack(scores) / math.sqrt(config.head_dim)).softmax(0)
                    values = torch.stack([self.head(k, "v", layer, head // group, p) for p, k in seen])
                    heads.append(weights @ values)
                out = slots[slot] + self.linear(torch.cat(heads), f"layers.{layer}.self_attn.o_proj")
                mlp_in = self.norm(out, f"layers.{layer}.post_attention_layernorm")
                gate = self.linear(mlp_in, f"layers.{layer}.mlp.gate_proj")
                up = self.linear(mlp_in, f"layers.{layer}.mlp.up_proj")
                following.append(out + self.linear(gate * gate.sigmoid() * up, f"layers.{layer}.mlp.down_proj"))
            slots = following
        return torch.stack([self.norm(x, "norm") for x in slots])


def inputs(config: DrafterConfig, layout: PackLayout, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width = config.num_context_layers * config.hidden_size
    states = torch.randn(layout.num_tokens, width, generator=generator, dtype=torch.float64)
    embeds = torch.randn(layout.num_anchors * config.block_size, config.hidden_size, generator=generator).double()
    return states, embeds


@pytest.mark.parametrize("kinds", ["FF", "SF", "SS"])
def test_logits_equal_a_second_implementation(kinds: str, config_of: ConfigOf, drafter_of: DrafterOf) -> None:
    config = config_of(kinds, block_size=4, hidden_size=24, head_dim=16, sliding_window=3 if "S" in kinds else None)
    model = drafter_of(config)
    layout = PackLayout(torch.tensor([0, 6, 11]), torch.tensor([0, 4, 6, 10, 11]))
    states, embeds = inputs(config, layout)
    head = torch.randn(50, config.hidden_size, generator=torch.Generator().manual_seed(9)).double()
    with torch.inference_mode():
        logits = (model(embeds, model.context_features(states), layout, "plain") @ head.T).unflatten(0, (-1, 4))
        by_hand = ByHand(dict(model.state_dict()), config)
        for index, (anchor, start) in enumerate(zip(layout.anchors.tolist(), layout.row_starts.tolist(), strict=True)):
            expected = by_hand.block(embeds[index * 4 : index * 4 + 4], states[start:anchor])
            torch.testing.assert_close(logits[index], expected @ head.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["plain", "segment"])
@pytest.mark.parametrize("kinds", ["FF", "SF"])
def test_states_at_and_after_an_anchor_do_not_reach_its_block(
    kinds: str, attention: str, config_of: ConfigOf, drafter_of: DrafterOf
) -> None:
    config = config_of(kinds)
    model = drafter_of(config)
    layout = PackLayout(torch.tensor([0, 10, 30]), torch.tensor([4, 12, 20, 25]))
    states, embeds = inputs(config, layout)
    with torch.inference_mode():
        before = model(embeds, model.context_features(states), layout, attention).unflatten(0, (4, -1))
        changed = states.clone()
        changed[20:] += 5 * torch.randn(changed[20:].shape, generator=torch.Generator().manual_seed(3)).double()
        after = model(embeds, model.context_features(changed), layout, attention).unflatten(0, (4, -1))
    assert torch.equal(before[:3], after[:3])  # of row 0, and of anchors 12 and 20 in row 1
    assert not torch.allclose(before[3], after[3])
    with torch.inference_mode():
        changed = states.clone()
        changed[19] += 5
        after = model(embeds, model.context_features(changed), layout, attention).unflatten(0, (4, -1))
    assert torch.equal(before[:2], after[:2])
    assert not torch.allclose(before[2], after[2])


def test_a_block_does_not_depend_on_the_other_blocks_and_rows(config_of: ConfigOf, drafter_of: DrafterOf) -> None:
    config = config_of("SF")
    model = drafter_of(config)
    layout = PackLayout(torch.tensor([0, 10, 30]), torch.tensor([4, 12, 20, 25]))
    states, embeds = inputs(config, layout)
    with torch.inference_mode():
        together = model(embeds, model.context_features(states), layout)
        alone = PackLayout.single_row(15, [15])
        single = model(embeds[3 * 8 :], model.context_features(states[10:25]), alone)
    torch.testing.assert_close(together[3 * 8 :], single, rtol=1e-6, atol=1e-6)


def test_rotary_positions_are_those_of_qwen3() -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

    config = Qwen3Config(head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 12345.0})
    positions = torch.tensor([0, 1, 17, 4000])
    x = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(0))
    cos, sin = Qwen3RotaryEmbedding(config)(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    found = rotate(x, rotary(positions, 32, 12345.0, torch.float32))
    torch.testing.assert_close(found, expected[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


def test_norms_are_computed_in_float32_under_low_precision() -> None:
    norm = RMSNorm(64, 1e-6)
    x = (torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * 300).bfloat16()
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x), exact.bfloat16(), rtol=0.005, atol=0)
    assert norm(x.double()).dtype == torch.float64


def test_autocast_runs_forward_and_backward(config_of: ConfigOf, drafter_of: DrafterOf) -> None:
    config = config_of("SF")
    model = drafter_of(config, dtype=torch.float32)
    layout = PackLayout.single_row(20, [3, 9, 15])
    states, embeds = inputs(config, layout)
    wide = model(embeds.float(), model.context_features(states.float()), layout)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(embeds.float(), model.context_features(states.float()), layout)
    out.float().square().mean().backward()
    assert float((out.float() - wide).detach().norm() / wide.detach().norm()) < 0.05
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_every_parameter_gets_a_gradient(config_of: ConfigOf, drafter_of: DrafterOf) -> None:
    config = config_of("SF")
    model = drafter_of(config)
    layout = PackLayout.single_row(20, [3, 9])
    states, embeds = inputs(config, layout)
    out = model(embeds, model.context_features(states), layout)
    (out * torch.arange(config.hidden_size)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool((parameter.grad != 0).any()), name


def test_sizes_that_do_not_fit_the_layout_are_refused(config_of: ConfigOf, drafter_of: DrafterOf) -> None:
    config = config_of()
    model = drafter_of(config)
    layout = PackLayout.single_row(20, [3, 9])
    states, embeds = inputs(config, layout)
    with pytest.raises(ConfigError, match="20"):
        model(embeds, model.context_features(states[:-1]), layout)
    with pytest.raises(ConfigError, match="2 anchors"):
        model(embeds[:-1], model.context_features(states), layout)


def test_weights_are_a_function_of_the_generator(config_of: ConfigOf) -> None:
    first, second, other = (DFlashDrafter(config_of()) for _ in range(3))
    for model, seed in ((first, 1), (second, 1), (other, 2)):
        init_weights(model, torch.Generator().manual_seed(seed), std=0.03)
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
        assert torch.equal(value, other.state_dict()[name]) == ("norm" in name)
    assert first.fc.weight.std().item() == pytest.approx(0.03, rel=0.05)


def test_statistics_level_the_context_channels_and_the_first_logits(config_of: ConfigOf) -> None:
    model = DFlashDrafter(config_of())
    init_weights(model, torch.Generator().manual_seed(0))
    before = model.fc.weight.detach().clone()
    rms = torch.linspace(0, 40, 128)
    init_from_statistics(model, rms, head_std=0.05)
    torch.testing.assert_close(model.fc.weight[:, 1:], before[:, 1:] / rms[1:])
    assert torch.equal(model.fc.weight[:, 0], before[:, 0])  # a channel that is always zero
    layout = PackLayout.single_row(10, [5])
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(2000, 64, generator=generator) * 0.05
    out = model(torch.randn(8, 64, generator=generator), model.context_features(torch.randn(10, 128) * rms), layout)
    assert (out @ head.T).std().item() == pytest.approx(1, rel=0.15)


def test_under_a_tied_head_a_fresh_slot_says_its_own_input(config_of: ConfigOf) -> None:
    model = DFlashDrafter(config_of())
    init_weights(model, torch.Generator().manual_seed(0))
    head = torch.randn(2000, 64, generator=torch.Generator().manual_seed(1)) * 0.05
    init_from_statistics(model, torch.ones(128), head_std=float(head.std()))
    layout = PackLayout.single_row(10, [5])
    out = model(head[7].expand(8, -1), model.context_features(torch.randn(10, 128)), layout)
    logits = out @ head.T
    assert logits.argmax(-1).tolist() == [7] * 8
    assert logits[:, 7].mean().item() == pytest.approx(float(head[7].norm() / head.std()), rel=0.25)


@pytest.mark.parametrize("rms", [torch.ones(127), torch.full((128,), -1.0), torch.full((128,), float("nan"))])
def test_statistics_that_do_not_fit_are_refused(rms: Tensor, config_of: ConfigOf) -> None:
    model = DFlashDrafter(config_of())
    with pytest.raises(ConfigError, match="channel_rms"):
        init_from_statistics(model, rms, 1.0)
    with pytest.raises(ConfigError, match="head_std"):
        init_from_statistics(model, torch.ones(128), 0.0)
