"""Greedy drafts of a drafter: whole blocks, hits at every slot, and the offline walk.

Axes: T context tokens, A anchors, B block, K context layers, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .attention import KeyValue
from .layout import PackLayout
from .model import DFlashDrafter
from .walk import RowWalk, WalkRow, eligible_anchors, walk_rows

HEAD_CHUNK_LOGITS = 2**24
"""Logits computed at once: 64 MB in float32, whatever the pack."""
CHUNK_BLOCK_TOKENS = 4096
"""Block tokens that go through the drafter at once, whatever the pack."""


def block_inputs(embed_tokens: Tensor, anchor_tokens: Tensor, mask_token_id: int, block_size: int) -> Tensor:
    """Return the block embeddings [A*B, H]: embed(anchor token), then B-1 times embed(mask).

    embed_tokens: [V, H]; anchor_tokens: [A] int64.
    """
    ids = torch.full((len(anchor_tokens), block_size), mask_token_id, dtype=torch.int64)
    ids[:, 0] = anchor_tokens
    return nn.functional.embedding(ids.flatten().to(embed_tokens.device), embed_tokens)


def argmax_tokens(hidden: Tensor, head_weight: Tensor) -> Tensor:
    """Return [N] int64: the most likely token of each state [N, H]; equal logits go to the lowest id."""
    parts = [logits.argmax(-1) for _, logits in head_chunks(hidden, head_weight)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def head_chunks(hidden: Tensor, head_weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield logits [n, V] of the states [N, H], n at a time, with their place among the N.

    At most HEAD_CHUNK_LOGITS numbers exist at once (or one state's).
    """
    if head_weight.dtype != hidden.dtype:
        wide = torch.promote_types(head_weight.dtype, hidden.dtype)
        hidden, head_weight = hidden.to(wide), head_weight.to(wide)
    step = max(1, HEAD_CHUNK_LOGITS // head_weight.shape[0])
    for first in range(0, len(hidden), step):
        part = slice(first, first + step)
        yield part, nn.functional.linear(hidden[part], head_weight)


@torch.inference_mode()
def pack_key_values(model: DFlashDrafter, states: Tensor, row_offsets: Tensor) -> list[KeyValue]:
    """Return each layer's keys and values of a pack's context: what every block of it reads, computed once.

    states: [T, K*H] of the target; row_offsets: [R+1] int64.
    """
    positions = PackLayout(row_offsets, torch.empty(0, dtype=torch.int64)).positions
    return model.context_key_values(model.context_features(states.to(model.fc.weight)), positions)


@torch.inference_mode()
def draft_blocks(
    model: DFlashDrafter,
    head_weight: Tensor,
    embed_tokens: Tensor,
    key_values: Sequence[KeyValue],
    *,
    layout: PackLayout,
    tokens: Tensor,
    attention: str = "auto",
) -> Tensor:
    """Return the greedy drafts [A, B-1] int64 of all anchors of a pack.

    key_values: from `pack_key_values`; tokens: [T] ids of the pack. The anchors must lie inside their rows.
    """
    embeds = _embeds(model, embed_tokens, tokens.to(torch.int64)[layout.anchors])
    hidden = model.blocks(embeds, key_values, layout, attention)
    slots = hidden.view(layout.num_anchors, model.config.block_size, hidden.shape[-1])[:, 1:]
    return argmax_tokens(slots.flatten(0, 1), head_weight).view(slots.shape[:2]).cpu()


@dataclass(frozen=True)
class SlotCounts:
    """For slots k = 1..B-1: how many drafts were right, of how many that had a token to compare with."""

    hits: Tensor
    totals: Tensor

    def __add__(self, other: SlotCounts) -> SlotCounts:
        return SlotCounts(self.hits + other.hits, self.totals + other.totals)

    @property
    def accuracy(self) -> list[float]:
        """hits / totals per slot; nan where nothing was compared."""
        return (self.hits.double() / self.totals.double()).tolist()


def slot_counts(drafts: Tensor, layout: PackLayout, tokens: Tensor, loss_mask: Tensor) -> SlotCounts:
    """Compare drafts [A, B-1] with the tokens [T] of their pack, up to the first hole of loss_mask or the row's end."""
    wanted = slot_tokens(layout, drafts.shape[1], tokens, loss_mask)
    return SlotCounts(((wanted == drafts) & (wanted >= 0)).sum(0), (wanted >= 0).sum(0))


def slot_tokens(layout: PackLayout, num_slots: int, tokens: Tensor, loss_mask: Tensor) -> Tensor:
    """Return [A, num_slots] int64: the row's own token at each slot, -1 from its end or a hole of the mask on."""
    slots = layout.anchors[:, None] + torch.arange(1, num_slots + 1)
    inside = slots < layout.row_offsets[layout.rows + 1][:, None]
    slots = slots.clamp(max=max(len(tokens) - 1, 0))
    compared = (inside & loss_mask.bool()[slots]).cumprod(1).bool()
    return torch.where(compared, tokens.to(torch.int64)[slots], -1)


@torch.inference_mode()
def block_states(
    model: DFlashDrafter,
    embed_tokens: Tensor,
    key_values: Sequence[KeyValue],
    layout: PackLayout,
    anchor_tokens: Tensor,
    attention: str = "auto",
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the final states [n, B, H] of n blocks at a time, with their place among the layout's anchors.

    key_values: of the pack's context, each layer's. anchor_tokens: [A] int64. Never more than CHUNK_BLOCK_TOKENS block
    tokens (or one block) exist at once.
    """
    size = model.config.block_size
    per_chunk = max(1, CHUNK_BLOCK_TOKENS // size)
    for first in range(0, layout.num_anchors, per_chunk):
        part = slice(first, first + per_chunk)
        chunk = layout.part(part)
        embeds = _embeds(model, embed_tokens, anchor_tokens[part])
        yield part, model.blocks(embeds, key_values, chunk, attention).view(chunk.num_anchors, size, -1)


@torch.inference_mode()
def walk_pack(
    model: DFlashDrafter,
    head_weight: Tensor,
    embed_tokens: Tensor,
    key_values: Sequence[KeyValue],
    *,
    row_offsets: Tensor,
    rows: Sequence[WalkRow],
    attention: str = "auto",
) -> list[RowWalk]:
    """Walk all rows of a pack with the drafter. rows: as `row_offsets` [R+1] cuts it; key_values: `pack_key_values`.

    Every anchor is drafted, in chunks, although a walk needs only some: a few large products cost less than hundreds of
    small ones in turn (16 rows of SmolLM2 at tau 1.2: see docs/log.md). The head is applied slot by slot, to the blocks
    that are still right, so a block costs about tau slots of it, not B-1.
    """
    starts = row_offsets.tolist()
    pairs = [(row, anchor) for row, walk in enumerate(rows) for anchor in eligible_anchors(walk.runs)]
    layout = PackLayout(
        row_offsets,
        torch.tensor([starts[row] + anchor for row, anchor in pairs], dtype=torch.int64),
        torch.tensor([row for row, _ in pairs], dtype=torch.int64),
    )
    tokens = torch.tensor([rows[row].tokens[anchor] for row, anchor in pairs], dtype=torch.int64)
    drafts: dict[tuple[int, int], list[int]] = {}
    for part, hidden in block_states(model, embed_tokens, key_values, layout, tokens, attention):
        drafts |= zip(pairs[part], _drafts_while_right(hidden, head_weight, rows, pairs[part]), strict=True)
    return walk_rows(lambda wanted: [drafts[pair] for pair in wanted], rows)


def _drafts_while_right(
    hidden: Tensor, head_weight: Tensor, rows: Sequence[WalkRow], pairs: Sequence[tuple[int, int]]
) -> list[list[int]]:
    """Return each block's drafts up to its first wrong one, -1 after it. hidden: [A, B, H]."""
    num_drafts = hidden.shape[1] - 1
    drafts = [[-1] * num_drafts for _ in pairs]
    alive = list(range(len(pairs)))
    for slot in range(num_drafts):
        wanted = {}
        for block in alive:
            row, anchor = pairs[block]
            if anchor + slot + 1 < len(rows[row].tokens):
                wanted[block] = rows[row].tokens[anchor + slot + 1]
        if not wanted:
            break
        found = argmax_tokens(hidden[list(wanted), slot + 1], head_weight).tolist()
        for block, token in zip(wanted, found, strict=True):
            drafts[block][slot] = token
        alive = [block for block, token in zip(wanted, found, strict=True) if token == wanted[block]]
    return drafts


class ContextCache:
    """Keys and values of one row's context, layer by layer, that live decoding extends and crops."""

    def __init__(self, model: DFlashDrafter) -> None:
        self.model = model
        self.num_tokens = 0
        self.key_values: list[KeyValue] = []

    @torch.inference_mode()
    def append(self, states: Tensor) -> None:
        """Add the target's states [n, K*H] of the next n tokens."""
        positions = torch.arange(self.num_tokens, self.num_tokens + len(states))
        context = self.model.context_features(states.to(self.model.fc.weight))
        new = self.model.context_key_values(context, positions)
        if self.key_values:
            new = [
                (torch.cat([keys, more_keys]), torch.cat([values, more_values]))
                for (keys, values), (more_keys, more_values) in zip(self.key_values, new, strict=True)
            ]
        self.key_values = new
        self.num_tokens += len(states)

    def crop(self, num_tokens: int) -> None:
        """Forget all tokens from position `num_tokens` on."""
        self.num_tokens = min(self.num_tokens, num_tokens)
        self.key_values = [(keys[: self.num_tokens], values[: self.num_tokens]) for keys, values in self.key_values]

    @torch.inference_mode()
    def hidden(self, embed_tokens: Tensor, anchor_token: int, attention: str = "auto") -> Tensor:
        """Return the final states [B, H] of the block whose anchor stands right after the cached tokens."""
        layout = PackLayout.single_row(self.num_tokens, [self.num_tokens])
        embeds = _embeds(self.model, embed_tokens, torch.tensor([anchor_token]))
        key_values = self.key_values or self.model.empty_context()
        return self.model.blocks(embeds, key_values, layout, attention)

    def draft(self, head_weight: Tensor, embed_tokens: Tensor, anchor_token: int, attention: str = "auto") -> list[int]:
        """Return the greedy drafts, B-1 token ids, of that block."""
        drafts: list[int] = argmax_tokens(self.hidden(embed_tokens, anchor_token, attention)[1:], head_weight).tolist()
        return drafts


def _embeds(model: DFlashDrafter, embed_tokens: Tensor, anchor_tokens: Tensor) -> Tensor:
    """Return `block_inputs` in the drafter's dtype and device."""
    config = model.config
    return block_inputs(embed_tokens, anchor_tokens, config.mask_token_id, config.block_size).to(model.fc.weight)
