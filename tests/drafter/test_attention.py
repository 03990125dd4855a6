from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dflash_pipeline.drafter.attention import Scope, flex_attention, plain_attention
from dflash_pipeline.drafter.config import DrafterConfig
from dflash_pipeline.drafter.layout import PackLayout
from dflash_pipeline.drafter.model import DFlashDrafter
from dflash_pipeline.errors import ConfigError

ConfigOf = Callable[..., DrafterConfig]
DrafterOf = Callable[..., DFlashDrafter]
LayoutOf = Callable[..., PackLayout]


def values_and_gradients(model: DFlashDrafter, layout: PackLayout, attention: str) -> list[Tensor]:
    """The output, and the gradient of every parameter and both inputs."""
    config = model.config
    generator = torch.Generator().manual_seed(1)
    width = config.num_context_layers * config.hidden_size
    dtype = model.fc.weight.dtype
    states = torch.randn(layout.num_tokens, width, generator=generator, dtype=torch.float64).to(dtype)
    embeds = torch.randn(
        layout.num_anchors * config.block_size, config.hidden_size, generator=generator, dtype=torch.float64
    ).to(dtype)
    states.requires_grad_()
    embeds.requires_grad_()
    out = model(embeds, model.context_features(states), layout, attention)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype)
    inputs = [states, embeds, *model.parameters()]
    gradients = torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True)
    zeros = [
        torch.zeros_like(given) if found is None else found for given, found in zip(inputs, gradients, strict=True)
    ]
    return [out.detach(), *zeros]


def assert_same(model: DFlashDrafter, layout: PackLayout, tolerance: float) -> None:
    plain = values_and_gradients(model, layout, "plain")
    fast = values_and_gradients(model, layout, "segment")
    for reference, found in zip(plain, fast, strict=True):
        scale = max(float(reference.abs().max()), 0.1) if reference.numel() else 1.0
        assert found.shape == reference.shape
        assert reference.numel() == 0 or float((found - reference).abs().max()) <= tolerance * scale


@pytest.mark.parametrize("kinds", ["FF", "SF", "SS"])
@pytest.mark.parametrize("seed", range(5))
def test_segment_equals_plain_in_values_and_gradients(
    kinds: str, seed: int, config_of: ConfigOf, drafter_of: DrafterOf, layout_of: LayoutOf
) -> None:
    block_size, window = ((2, 3), (3, 1), (8, 5), (5, 30), (16, 7))[seed]
    config = config_of(kinds, block_size=block_size, sliding_window=window if "S" in kinds else None)
    assert_same(drafter_of(config, seed), layout_of(seed, max_length=40), 1e-11)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2), (1, 1)])
def test_segment_equals_plain_for_every_grouping_of_heads(
    heads: tuple[int, int], config_of: ConfigOf, drafter_of: DrafterOf, layout_of: LayoutOf
) -> None:
    config = config_of("SF", num_heads=heads[0], num_kv_heads=heads[1], head_dim=8)
    assert_same(drafter_of(config), layout_of(7), 1e-11)


@pytest.mark.parametrize(
    ("offsets", "anchors", "rows"),
    [
        ([0, 12], [5], None),  # one anchor
        ([0, 12], [0], None),  # no context at all
        ([0, 12], [12], None),  # the row's end, as in decoding
        ([0, 5, 12], [5, 12], [0, 1]),
        ([0, 5, 9, 20], [6, 8], None),  # rows without an anchor
        ([0, 5, 6], [0, 4, 5], None),
        ([0, 0, 3], [0, 0], [0, 1]),  # an empty row
        ([0, 40], list(range(40)), None),  # every anchor of a row: several tiles
        ([0, 7], [2, 2, 2], None),
        ([0, 7], [], None),
    ],
)
def test_segment_equals_plain_at_the_edges(
    offsets: list[int], anchors: list[int], rows: list[int] | None, config_of: ConfigOf, drafter_of: DrafterOf
) -> None:
    layout = PackLayout(
        torch.tensor(offsets),
        torch.tensor(anchors, dtype=torch.int64),
        None if rows is None else torch.tensor(rows),
    )
    assert_same(drafter_of(config_of("SF")), layout, 1e-11)


def test_segment_equals_the_float64_reference_in_float32(
    config_of: ConfigOf, drafter_of: DrafterOf, layout_of: LayoutOf
) -> None:
    config, layout = config_of("FSF"), layout_of(3, max_length=60)
    reference = values_and_gradients(drafter_of(config), layout, "plain")
    found = values_and_gradients(drafter_of(config).float(), layout, "segment")
    for wide, narrow in zip(reference, found, strict=True):
        assert float((wide - narrow).norm()) <= 1e-5 * float(wide.norm())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 6])
def test_flex_equals_plain(window: int | None, layout_of: LayoutOf, monkeypatch: pytest.MonkeyPatch) -> None:
    # The same call as on CUDA, but not compiled: torch then computes it from the scores and the block mask.
    from torch.nn.attention.flex_attention import flex_attention as uncompiled

    monkeypatch.setattr("dflash_pipeline.drafter.attention._compiled_flex", lambda: uncompiled)
    layout = layout_of(5)
    generator = torch.Generator().manual_seed(0)
    num_slots = layout.num_anchors * 4
    queries = torch.randn(num_slots, 4, 16, generator=generator)
    context = (torch.randn(layout.num_tokens, 2, 16, generator=generator),) * 2
    own = (torch.randn(num_slots, 2, 16, generator=generator), torch.randn(num_slots, 2, 16, generator=generator))
    scope = Scope(layout, 4, window)
    with torch.inference_mode():
        reference = plain_attention(queries, context, own, scope)
        torch.testing.assert_close(flex_attention(queries, context, own, scope), reference)


def test_an_unknown_attention_is_refused(config_of: ConfigOf, drafter_of: DrafterOf) -> None:
    with pytest.raises(ConfigError, match="auto, plain, segment, flex"):
        values_and_gradients(drafter_of(config_of()), PackLayout.single_row(4, [2]), "sdpa")


def test_masks_are_built_once_for_all_layers_of_a_kind(
    config_of: ConfigOf, drafter_of: DrafterOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_pipeline.drafter import attention

    built: list[int | None] = []
    real = attention.segment_tiles

    def counted(*given: object) -> object:
        built.append(given[2])  # type: ignore[arg-type]
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "segment_tiles", counted)
    values_and_gradients(drafter_of(config_of("SFSF")), PackLayout.single_row(9, [2, 5]), "segment")
    assert sorted(built, key=str) == [5, None]
