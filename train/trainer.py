"""The model, its optimiser and the frozen parts of the target, and what one step does with them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..drafter.model import DFlashDrafter, init_from_statistics, init_weights
from ..errors import TrainingError
from ..store import CacheReader, TargetHead
from .checkpoint import list_checkpoints, read_checkpoint
from .config import ResolvedConfig
from .data import Pack
from .forward import TrainingForward
from .optimizer import build_optimizer, channel_scale, learning_rate, restore_moments, step_in_channel_units
from .parallel import Ranks, gradient_sync, spread, whole
from .step import StepInput


class Trainer:
    """Starts from the newest checkpoint of `run`, or from fresh weights; `first_step` says how many steps are done."""

    def __init__(self, cache: CacheReader, config: ResolvedConfig, ranks: Ranks, run: Path) -> None:
        self.config, self.ranks = config, ranks
        self.head = _float_head(cache.head(), ranks.device)
        weight = self.head.head_weight
        self.mask_logit = _mask_logit(self.head, config.drafter.mask_token_id)
        self.loss_head = weight.bfloat16() if config.precision == "bfloat16" else weight
        self.context_rms = torch.cat([cache.channel_rms(layer) for layer in config.drafter.context_layer_ids]).float()
        self.label_rms = None if config.label_layer is None else cache.channel_rms(config.label_layer).float()
        self.model = DFlashDrafter(config.drafter)
        init_weights(self.model, torch.Generator().manual_seed(config.recipe.seed))
        init_from_statistics(self.model, self.context_rms, float(weight.std()))
        checkpoints = list_checkpoints(run)
        self.first_step, moments = read_checkpoint(checkpoints[-1], self.model) if checkpoints else (0, {})
        self.model.to(ranks.device)
        recipe = config.recipe
        forward = TrainingForward(
            self.model,
            precision=config.precision,
            kl_weight=recipe.kl_weight,
            kl_temperature=recipe.kl_temperature,
        )
        self.forward = spread(forward, ranks, recipe.shard)
        self.channel_scale = channel_scale(self.context_rms).to(ranks.device)
        self.optimizer = build_optimizer(self.model, config)
        if checkpoints:
            restore_moments(self.optimizer, self.model, self.first_step, moments)

    def step(self, packs: list[Pack], step: int, total_weight: float) -> dict[str, Any]:
        """Do one step with this rank's packs; return its metrics over all ranks.

        Args:
            packs: of this rank.
            step: 0-based.
            total_weight: sum of the slots' weights over all packs of all ranks.

        Raises:
            TrainingError: the loss is not finite; nothing is changed.
        """
        rate = learning_rate(step, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        counts = _Counts(self.config.drafter.block_size)
        for number, pack in enumerate(packs):
            given = StepInput.prepare(
                pack, self.config, self.head, step, self.context_rms, self.label_rms, self.ranks.device
            )
            with gradient_sync(self.forward, last=number == len(packs) - 1):
                loss, hits = self.forward(given, self.head.embed_tokens, self.loss_head)
                (loss * (self.ranks.size / total_weight)).backward()  # type: ignore[no-untyped-call]
            counts.add(pack, loss.item() / total_weight, hits.cpu())
        values = self.ranks.sums(counts.values)
        if not math.isfinite(values[0]):
            raise TrainingError(
                f"step {step + 1}: the loss is {values[0]}; the rows of this step: {_row_ids(packs)}; "
                "the last checkpoint is whole: lower lr or grad_clip in a new run"
            )
        norm = step_in_channel_units(self.optimizer, self.model, self.channel_scale, self.config.recipe.grad_clip)
        return {"epoch": packs[0].spec.epoch, "grad_norm": norm, "lr": rate, **counts.summary(values)}

    def whole_model(self) -> DFlashDrafter:
        """Return the drafter with all its weights; every rank must call this."""
        if self.config.recipe.shard == "none":
            return self.model
        weights = {name: whole(parameter.detach()).cpu() for name, parameter in self.model.named_parameters()}
        model = DFlashDrafter(self.config.drafter)
        model.load_state_dict(weights)
        return model.to(self.ranks.device)


class _Counts:
    """Sums over packs, in one list so that ranks can add theirs."""

    def __init__(self, block_size: int) -> None:
        self._slots = block_size - 1
        self.values = [0.0] * (5 + 2 * self._slots)

    def add(self, pack: Pack, loss: float, hits_N: Tensor) -> None:
        slots_N2 = pack.supervision.slots_N2
        right = torch.bincount(slots_N2[hits_N, 1], minlength=self._slots + 1)[1:]
        asked = torch.bincount(slots_N2[:, 1], minlength=self._slots + 1)[1:]
        ahead = _drafts_accepted(slots_N2, hits_N, pack.layout.num_anchors, self._slots)
        sizes = [pack.layout.num_anchors, len(hits_N), len(pack.tokens_T), ahead]
        added = [loss, *sizes, *right.tolist(), *asked.tolist()]
        self.values = [a + b for a, b in zip(self.values, added, strict=True)]

    def summary(self, values: list[float]) -> dict[str, Any]:
        loss, anchors, supervised, tokens, ahead = values[:5]
        right, asked = values[5 : 5 + self._slots], values[5 + self._slots :]
        return {
            "loss": loss,
            "anchors": int(anchors),
            "supervised": int(supervised),
            "context_tokens": int(tokens),
            "anchor_tau": round(1 + ahead / max(1, anchors), 4),
            "slot_accuracy": [round(r / n, 4) if n else None for r, n in zip(right, asked, strict=True)],
        }


def _drafts_accepted(slots_N2: Tensor, hits_N: Tensor, num_anchors: int, num_slots: int) -> int:
    """Return the number of slots that are right with all slots before them, over all blocks."""
    right_AS = torch.zeros(num_anchors, num_slots, dtype=torch.int64)
    right_AS[slots_N2[:, 0], slots_N2[:, 1] - 1] = hits_N.long()
    return int(right_AS.cumprod(1).sum())


def _mask_logit(head: TargetHead, mask_token_id: int) -> float | None:
    """Return the logit that a slot of fresh weights gives the mask token itself, under a tied head; else None.

    Its state is the mask token's embedding, brought to the length 1 / std(head) by `init_from_statistics`.
    """
    if head.lm_head is not None:
        return None
    return float(head.embed_tokens[mask_token_id].norm() / head.embed_tokens.std())


def _float_head(head: TargetHead, device: torch.device) -> TargetHead:
    return replace(
        head,
        embed_tokens=head.embed_tokens.float().to(device),
        lm_head=None if head.lm_head is None else head.lm_head.float().to(device),
        norm=head.norm.float().to(device),
    )


def _row_ids(packs: list[Pack]) -> str:
    return ", ".join(name for pack in packs for name in pack.row_ids)
