"""Where a run's time goes, when the next line and checkpoint are due, and the lines themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import counted
from .config import ResolvedConfig
from .parallel import Ranks

LINE_SECONDS = 15.0
LOW_SHARE = 0.5


class Clock:
    """Counts seconds, tokens and the wait for data from the start of this process's part of a run."""

    def __init__(self, config: ResolvedConfig, first_step: int) -> None:
        self.wait_seconds = self.step_seconds = 0.0
        self._steps, self._first_step = config.steps, first_step
        self._checkpoint_seconds = config.recipe.checkpoint_minutes * 60
        self._tokens = 0
        self._started = self._spoke = self._saved = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._started

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what happens inside as waiting for data."""
        before = time.perf_counter()
        yield
        self.wait_seconds += time.perf_counter() - before

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Count what happens inside as a step's own time."""
        before = time.perf_counter()
        yield
        self.step_seconds += time.perf_counter() - before

    def count(self, metrics: dict[str, Any]) -> None:
        """Count a step's tokens."""
        self._tokens += metrics["context_tokens"]

    def checkpoint_due(self) -> bool:
        """True where the last checkpoint is `checkpoint_minutes` old."""
        return time.perf_counter() - self._saved > self._checkpoint_seconds

    def saved(self) -> None:
        """Note that a checkpoint was written."""
        self._saved = time.perf_counter()

    def line_due(self) -> bool:
        """True every `LINE_SECONDS`."""
        return time.perf_counter() - self._spoke > LINE_SECONDS

    def line(self, step: int, metrics: dict[str, Any]) -> str:
        """Return the line for people of a finished step."""
        self._spoke = time.perf_counter()
        left = int((self._steps - step) * self.seconds / max(1, step - self._first_step))
        parts = [
            f"step {step}/{self._steps}",
            f"loss {metrics['loss']:.3f}",
            f"first slot {metrics['slot_accuracy'][0] or 0:.3f}",
            f"tau over its anchors {metrics['anchor_tau']:.2f}",
        ]
        if "heldout" in metrics:
            parts.append(f"held-out tau {metrics['heldout']['tau']['micro']:.3f}")
        parts += [
            f"{self._tokens / self.seconds:,.0f} tokens/s",
            f"waiting for data {self.wait_seconds / self.seconds:.1%}",
            f"{left // 60}:{left % 60:02d} left",
        ]
        return "  ".join(parts)


def describe_run(config: ResolvedConfig, ranks: Ranks, whole_blocks: float, say: Callable[[str], None]) -> None:
    """Say what is trained, and how; `whole_blocks` is `whole_block_share` of the training rows."""
    drafter = config.drafter
    say(
        f"drafter: {counted(drafter.num_layers, 'layer')}, hidden {drafter.hidden_size}, block {drafter.block_size}, "
        f"mask token {drafter.mask_token_id}, context layers {list(drafter.context_layer_ids)}, "
        f"labels {config.recipe.label_source}"
    )
    shared = f", {ranks.size} processes" if ranks.size > 1 else ""
    packs = f", {config.packs_per_step} packs a step" if config.packs_per_step > 1 else ""
    say(
        f"run: {counted(config.steps, 'step')}, lr {config.lr:g} after {counted(config.warmup_steps, 'warmup step')}"
        f"{packs}, {config.precision} on {ranks.device}{shared}"
    )
    hint = "; a smaller block_size would waste less" if whole_blocks < LOW_SHARE else ""
    say(f"blocks: up to {whole_blocks:.0%} of the anchors have a reply that fills their whole block{hint}")
