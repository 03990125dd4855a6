from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dflash_pipeline.drafter import draft as drafting
from dflash_pipeline.drafter.attention import KeyValue
from dflash_pipeline.drafter.config import DrafterConfig
from dflash_pipeline.drafter.draft import (
    ContextCache,
    argmax_tokens,
    block_inputs,
    draft_blocks,
    pack_key_values,
    slot_counts,
    walk_pack,
)
from dflash_pipeline.drafter.layout import PackLayout
from dflash_pipeline.drafter.model import DFlashDrafter
from dflash_pipeline.drafter.walk import WalkRow, eligible_anchors, walk_rows

ConfigOf = Callable[..., DrafterConfig]
DrafterOf = Callable[..., DFlashDrafter]
VOCAB = 6
"""So few tokens that a random drafter is often right."""


class Setting:
    """A random drafter over six tokens, and a pack of three rows, the second with two turns."""

    def __init__(self, config: DrafterConfig, model: DFlashDrafter) -> None:
        generator = torch.Generator().manual_seed(4)
        lengths = [40, 31, 18]
        self.model = model
        self.offsets = torch.tensor([0, 40, 71, 89])
        self.embed = torch.randn(VOCAB, config.hidden_size, generator=generator).double()
        self.head = torch.randn(VOCAB, config.hidden_size, generator=generator).double()
        self.tokens = torch.randint(VOCAB, (89,), generator=generator)
        self.states = torch.randn(89, 128, generator=generator).double()
        self.mask = torch.ones(89, dtype=torch.bool)
        self.mask[:6] = self.mask[40:49] = self.mask[58:62] = self.mask[71:72] = False
        parts = zip(self.tokens.split(lengths), self.mask.split(lengths), strict=True)
        self.rows = [WalkRow.of(tokens.tolist(), mask.tolist()) for tokens, mask in parts]


@pytest.fixture(params=["FF", "SF"])
def setting(request: pytest.FixtureRequest, config_of: ConfigOf, drafter_of: DrafterOf) -> Setting:
    config = config_of(request.param, vocab_size=VOCAB, block_size=5)
    return Setting(config, drafter_of(config))


def one_block(setting: Setting, row: int, anchor: int) -> list[int]:
    """A block drafted alone, from the row's states before the anchor, by the plain reference."""
    start = int(setting.offsets[row])
    layout = PackLayout.single_row(anchor, [anchor])
    token = setting.tokens[start + anchor : start + anchor + 1]
    with torch.inference_mode():
        context = setting.model.context_features(setting.states[start : start + anchor])
        hidden = setting.model(block_inputs(setting.embed, token, 3, 5), context, layout, "plain")
        drafts: list[int] = (hidden[1:] @ setting.head.T).argmax(-1).tolist()
    return drafts


def test_block_input_is_the_anchor_and_masks() -> None:
    embed = torch.arange(10.0)[:, None].expand(10, 2)
    assert block_inputs(embed, torch.tensor([7, 1]), 3, 3)[:, 0].tolist() == [7, 3, 3, 1, 3, 3]


def test_equal_logits_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.eye(3).repeat(40, 1)
    head = torch.tensor([[0.0, 1, 1], [2, 1, 0], [2, 0, 1], [1, 1, 1]])
    assert argmax_tokens(hidden, head).tolist() == [1, 0, 0] * 40
    monkeypatch.setattr(drafting, "HEAD_CHUNK_LOGITS", 7)
    assert argmax_tokens(hidden, head).tolist() == [1, 0, 0] * 40
    assert argmax_tokens(hidden, head.bfloat16()).tolist() == [1, 0, 0] * 40
    assert argmax_tokens(hidden[:0], head).shape == (0,)


def test_full_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = torch.nn.functional.linear

    def counted(x: Tensor, weight: Tensor) -> Tensor:
        out = real(x, weight)
        sizes.append(out.numel())
        return out

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    argmax_tokens(torch.randn(300, 4), torch.randn(150_000, 4))
    assert max(sizes) <= drafting.HEAD_CHUNK_LOGITS
    assert sum(sizes) == 300 * 150_000


def key_values_of(setting: Setting) -> list[KeyValue]:
    return pack_key_values(setting.model, setting.states, setting.offsets)


def test_all_anchors_of_a_pack_draft_as_each_alone(setting: Setting) -> None:
    pairs = [(row, anchor) for row in range(3) for anchor in eligible_anchors(setting.rows[row].runs)]
    anchors = torch.tensor([int(setting.offsets[row]) + anchor for row, anchor in pairs])
    layout = PackLayout(setting.offsets, anchors)
    drafts = draft_blocks(
        setting.model, setting.head, setting.embed, key_values_of(setting), layout=layout, tokens=setting.tokens.int()
    )
    assert drafts.tolist() == [one_block(setting, row, anchor) for row, anchor in pairs]
    counts = slot_counts(drafts, layout, setting.tokens, setting.mask)
    for slot in range(1, 5):
        compared = hits = 0
        for (row, anchor), block in zip(pairs, drafts.tolist(), strict=True):
            last = next(end for first, end in setting.rows[row].runs if first <= anchor < end)
            if anchor + slot < last:
                compared += 1
                hits += setting.rows[row].tokens[anchor + slot] == block[slot - 1]
        assert (counts.hits[slot - 1], counts.totals[slot - 1]) == (hits, compared)
        assert counts.accuracy[slot - 1] == hits / compared
    assert (counts + counts).totals.tolist() == [2 * total for total in counts.totals.tolist()]


def test_a_pack_without_anchors_drafts_nothing(setting: Setting) -> None:
    layout = PackLayout(setting.offsets, torch.tensor([], dtype=torch.int64))
    drafts = draft_blocks(
        setting.model, setting.head, setting.embed, key_values_of(setting), layout=layout, tokens=setting.tokens
    )
    assert drafts.shape == (0, 4)
    assert slot_counts(drafts, layout, setting.tokens, setting.mask).totals.tolist() == [0] * 4


def test_the_walk_equals_one_block_at_a_time(setting: Setting) -> None:
    found = walk_pack(
        setting.model,
        setting.head,
        setting.embed,
        key_values_of(setting),
        row_offsets=setting.offsets,
        rows=setting.rows,
    )
    expected = walk_rows(lambda pairs: [one_block(setting, row, anchor) for row, anchor in pairs], setting.rows)
    assert found == expected
    assert sum(sum(walk.accepted) for walk in found) > 5


def test_a_context_cache_drafts_what_a_whole_forward_drafts(setting: Setting) -> None:
    cache = ContextCache(setting.model)
    tokens = setting.tokens.tolist()
    for count, keep in ((0, 0), (9, 9), (5, 12), (1, 13), (4, 17)):
        cache.append(setting.states[cache.num_tokens : cache.num_tokens + count])
        cache.crop(keep)
        assert cache.num_tokens == keep
        assert cache.draft(setting.head, setting.embed, tokens[keep]) == one_block(setting, 0, keep)
