"""What lies behind a tau: is the context read, is a context layer ignored, do mask and rotation hold, who diverged.

Axes: T tokens of a row, A anchors, B block, K context layers, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..drafter.draft import block_inputs
from ..drafter.layout import PackLayout
from ..drafter.model import DFlashDrafter
from ..drafter.walk import RowWalk, WalkRow, eligible_anchors, micro_tau
from ..store import CacheReader, Row
from .measure import FrozenHead, PackFigures, measure_pack

TOLERANCE = 1e-2
"""Largest relative error of a self-check: float32 angles at position 32,768 are off by 2e-3."""


class Diagnosis:
    """Looks at every pack that an evaluation measures; `summary` then tells what was seen."""

    def __init__(self, model: DFlashDrafter, head: FrozenHead) -> None:
        self.model, self.head = model, head
        self.zeroed: list[RowWalk] = []
        self.accepted = [0] * model.config.block_size
        self.rejected = self.rejected_diverged = 0
        self.longest: Row | None = None

    def add(self, pack: Sequence[Row], found: PackFigures) -> None:
        """Take a measured pack; its rows are walked once more with their context zeroed."""
        self.zeroed += measure_pack(self.model, self.head, [without_context(row) for row in pack]).walks
        for row, walk in zip(pack, found.walks, strict=True):
            self._count(row, walk)
            if self.longest is None or len(row.tokens) > len(self.longest.tokens):
                self.longest = row

    def _count(self, row: Row, walk: RowWalk) -> None:
        last = [end - 1 for _, end in WalkRow.of(row.tokens.tolist(), row.loss_mask.tolist()).runs]
        for anchor, accepted in zip(walk.anchors, walk.accepted, strict=True):
            self.accepted[accepted] += 1
            wrong = anchor + accepted + 1
            if accepted == self.model.config.block_size - 1 or wrong > next(end for end in last if end > anchor):
                continue  # nothing was rejected: the block or the reply was over
            self.rejected += 1
            self.rejected_diverged += int(row.tokens[wrong] != row.top_ids[wrong - 1, 0])

    def summary(self, cache: CacheReader, on_policy_share: float) -> dict[str, Any]:
        """Return JSON values: `context_zeroed_tau` (micro), and `diagnosis`.

        In it: accepted_histogram [B], verifications that accepted 0..B-1 drafts; context_layers, see `fc_columns`;
        checks, see `self_checks`; divergence_share, supervised tokens that are not the target's own choice;
        rejected_diverged_share, rejections at such a token, where the row and not the drafter left the target's path.
        """
        rejected = self.rejected_diverged / self.rejected if self.rejected else 0.0
        return {
            "context_zeroed_tau": micro_tau(self.zeroed),
            "diagnosis": {
                "accepted_histogram": self.accepted,
                "context_layers": fc_columns(self.model, cache),
                "checks": self_checks(self.model, self.head, self.longest) if self.longest else {},
                "divergence_share": 1 - on_policy_share,
                "rejected_diverged_share": rejected,
            },
        }


def without_context(row: Row) -> Row:
    """Return the row with every state zero: no key of the context then stands out and every value of it is zero."""
    return replace(row, states={layer: torch.zeros_like(states) for layer, states in row.states.items()})


def fc_columns(model: DFlashDrafter, cache: CacheReader) -> list[dict[str, float]]:
    """Return for each context layer, in fc's order, the RMS of its columns and what they yield on the cache's states.

    `rms` is of the weights alone. States differ in scale by layer and channel, so `output_share` weighs each column
    by the RMS of its channel: the layer's share of fc's output energy, channels taken as independent. Near zero: the
    drafter ignores that layer.
    """
    config = model.config
    parts = model.fc.weight.detach().double().cpu().chunk(config.num_context_layers, dim=1)
    rms = [float(part.square().mean().sqrt()) for part in parts]
    energy = [
        float((part * cache.channel_rms(layer).double()).square().sum())
        for part, layer in zip(parts, config.context_layer_ids, strict=True)
    ]
    total = sum(energy) or 1.0
    return [
        {"layer_id": layer, "rms": size, "output_share": share / total}
        for layer, size, share in zip(config.context_layer_ids, rms, energy, strict=True)
    ]


@torch.inference_mode()
def self_checks(model: DFlashDrafter, head: FrozenHead, row: Row) -> dict[str, Any]:
    """Check mask and rotation of this drafter on one real row; every error is relative to the largest value.

    Returns:
        mask_future_error: change of a block when the states at and after its anchor change (must be 0).
        mask_plain_error: fast attention against the dense mask.
        rope_error: rotated keys against the rotation written out in float64.
        reads_context: whether the block changes with the states before its anchor.
        ok: all errors within TOLERANCE.
    """
    config, like = model.config, model.fc.weight
    anchor = eligible_anchors(WalkRow.of(row.tokens.tolist(), row.loss_mask.tolist()).runs)[-1]
    layout = PackLayout.single_row(len(row.tokens), [anchor])
    states = torch.cat([row.states[layer] for layer in config.context_layer_ids], dim=1).to(like)
    token = row.tokens[anchor : anchor + 1].long()
    embeds = block_inputs(head.embed_tokens, token, config.mask_token_id, config.block_size).to(like)

    def block(states: Tensor, attention: str = "auto") -> Tensor:
        key_values = model.context_key_values(model.context_features(states), layout.positions)
        return model.blocks(embeds, key_values, layout, attention)

    found = block(states)
    before, after = states.clone(), states.clone()
    before[:anchor] = -before[:anchor]
    after[anchor:] = -after[anchor:]
    errors = {
        "mask_future_error": _error(block(after), found),
        "mask_plain_error": _error(block(states, "plain"), found),
        "rope_error": _rope_error(model, states),
    }
    return {
        **errors,
        "reads_context": _error(block(before), found) > 0,
        "ok": max(errors.values()) <= TOLERANCE and errors["mask_future_error"] == 0,
    }


def _rope_error(model: DFlashDrafter, states: Tensor) -> float:
    """Compare keys at positions 0..T-1 with keys at position 0 rotated in float64, as Qwen3 does: halves, not pairs."""
    context = model.context_features(states)
    positions = torch.arange(len(states))
    keys, at_zero = (
        model.context_key_values(context, where)[0][0] for where in (positions, torch.zeros_like(positions))
    )
    half = model.config.head_dim // 2
    frequencies = model.config.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
    turns = torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None, None] * frequencies)
    real, imaginary = at_zero.double().cpu().chunk(2, dim=-1)
    expected = torch.complex(real, imaginary) * turns
    return _error(keys.double().cpu(), torch.cat([expected.real, expected.imag], dim=-1))


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
