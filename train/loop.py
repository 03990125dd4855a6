"""The training run: cache in, drafter out. The target model is never loaded."""

from __future__ import annotations

import platform
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from .. import __version__
from ..drafter.checkpoint import save_drafter
from ..drafter.device import choose_device
from ..drafter.model import DFlashDrafter, init_from_statistics, init_weights
from ..errors import CacheMismatch, TrainingError
from ..store import CacheReader, TargetHead, open_cache
from .checkpoint import list_checkpoints, restore_checkpoint, save_checkpoint
from .config import Recipe, ResolvedConfig
from .data import Pack, open_packs
from .facts import resolve_for, training_rows
from .heldout import HeldOut
from .optimizer import build_optimizer, channel_scale, learning_rate, step_in_channel_units
from .run_folder import DRAFTER, RunFolder
from .step import StepInput, training_loss

REPORT_SECONDS = 15.0


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """One call of `dflash train`: where to read and write, and how; what is trained is the recipe's."""

    cache: Path
    out: Path
    recipe: Recipe
    num_workers: int = 1
    device: str = "auto"


def run_train(options: TrainOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """Train a drafter, or go on where an interrupted run of the same settings stopped.

    Args:
        options: see `TrainOptions`.
        say: takes lines for people.

    Returns:
        run, steps, final_loss, seconds, step_seconds, data_wait_seconds, peak_bytes, and more.

    Raises:
        DflashError: the settings, the cache or the run folder are not valid, or the loss is not finite.
    """
    device = choose_device(options.device)
    cache = open_cache(options.cache)
    folder = RunFolder(options.out)
    config = resolve_for(options.recipe, cache, folder, device)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(options.out / ".lock", timeout=0):
            return _train(options, cache, folder, config, device, say)
    except Timeout:
        raise CacheMismatch(f"{options.out}: another process is training into this folder") from None


def _train(
    options: TrainOptions,
    cache: CacheReader,
    folder: RunFolder,
    config: ResolvedConfig,
    device: torch.device,
    say: Callable[[str], None],
) -> dict[str, Any]:
    notices = folder.start(
        config, {"version": __version__, "torch": torch.__version__, "python": platform.python_version()}
    )
    result = folder.result()
    if result is not None:
        say(f"{options.out}: this run is finished already")
        return result
    for notice in notices:
        say(notice)
    _describe(config, device, say)
    trainer = _Trainer(cache, config, device)
    step = trainer.resume(options.out)
    folder.forget_metrics_after(step)
    if step:
        say(f"resumed after step {step} of {config.steps}")
    resumed_from = step
    started, spoke = time.perf_counter(), time.perf_counter()
    wait = busy = 0.0
    loss = float("nan")
    heldout = HeldOut(cache, config, trainer.head)
    table = training_rows(cache, config.recipe.heldout_share)
    with open_packs(cache, table, config, first_step=step, num_workers=options.num_workers) as packs:
        while step < config.steps:
            before = time.perf_counter()
            pack = next(packs)
            ready = time.perf_counter()
            metrics = trainer.step(pack, step)
            step += 1
            loss = metrics["loss"]
            wait += ready - before
            busy += time.perf_counter() - ready
            last = step == config.steps
            if last or step % config.eval_every == 0:
                metrics |= {"heldout": heldout.measure(trainer.model)} if heldout.num_rows else {}
            folder.append_metrics({"step": step, **metrics})
            if last or step % config.checkpoint_every == 0:
                extra = drafter_record(config, cache, step)
                save_checkpoint(
                    options.out, step, trainer.model, trainer.optimizer, extra, config.recipe.keep_checkpoints
                )
            if last or "heldout" in metrics or time.perf_counter() - spoke > REPORT_SECONDS:
                spoke = time.perf_counter()
                say(_progress_line(step, config.steps, metrics, spoke - started, step - resumed_from, wait))
    save_drafter(options.out / DRAFTER, trainer.model, extra=drafter_record(config, cache, step))
    result = {
        "run": str(options.out),
        "steps": step,
        "final_loss": loss,
        "seconds": time.perf_counter() - started,
        "step_seconds": busy / max(1, step - resumed_from),
        "data_wait_seconds": wait,
        "peak_bytes": peak_bytes(device),
        "resumed_from": resumed_from,
        "precision": config.precision,
        "lr": config.lr,
        "mask_token_id": config.drafter.mask_token_id,
        "num_parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "heldout": folder.heldout_curve(),
        "cache_identity": config.cache_identity,
        "cache_fingerprint": config.cache_fingerprint,
    }
    folder.finish(result)
    return result


class _Trainer:
    """The model, its optimiser and the frozen parts of the target."""

    def __init__(self, cache: CacheReader, config: ResolvedConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        head = cache.head()
        embed = head.embed_tokens.float().to(device)
        self.head: TargetHead = replace(
            head,
            embed_tokens=embed,
            lm_head=None if head.lm_head is None else head.lm_head.float().to(device),
            norm=head.norm.float().to(device),
        )
        weight = self.head.head_weight
        self.loss_head = weight.bfloat16() if config.precision == "bfloat16" else weight
        generator = torch.Generator().manual_seed(config.recipe.seed)
        self.model = DFlashDrafter(config.drafter)
        init_weights(self.model, generator)
        self.context_rms = torch.cat([cache.channel_rms(layer) for layer in config.drafter.context_layer_ids]).float()
        init_from_statistics(self.model, self.context_rms, float(weight.std()))
        self.model.to(device)
        self.channel_scale = channel_scale(self.context_rms).to(device)
        self.optimizer = build_optimizer(self.model, config)
        self.label_rms = None if config.label_layer is None else cache.channel_rms(config.label_layer).float()

    def resume(self, run: Path) -> int:
        """Load the newest checkpoint; return the number of finished steps."""
        checkpoints = list_checkpoints(run)
        return restore_checkpoint(checkpoints[-1], self.model, self.optimizer) if checkpoints else 0

    def step(self, pack: Pack, step: int) -> dict[str, Any]:
        """Do one step; return its metrics."""
        rate = learning_rate(step, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        given = StepInput.prepare(pack, self.config, self.head, step, self.context_rms, self.label_rms, self.device)
        loss, hits = training_loss(self.model, given, self.head.embed_tokens, self.loss_head, self.config)
        if not bool(torch.isfinite(loss)):
            raise TrainingError(
                f"step {step + 1}: the loss is {loss.item()}; its rows: {', '.join(pack.row_ids[:8])}; "
                "the last checkpoint is whole: lower lr or grad_clip in a new run"
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = step_in_channel_units(self.optimizer, self.model, self.channel_scale, self.config.recipe.grad_clip)
        return {
            "epoch": pack.spec.epoch,
            "loss": loss.item(),
            "grad_norm": norm,
            "lr": rate,
            "anchors": pack.layout.num_anchors,
            "supervised": len(hits),
            "context_tokens": len(pack.tokens_T),
            "slot_accuracy": _slot_accuracy(
                hits.cpu(), pack.supervision.slots_N2[:, 1], self.config.drafter.block_size
            ),
        }


def drafter_record(config: ResolvedConfig, cache: CacheReader, step: int) -> dict[str, Any]:
    """Return what a drafter's config.json says of the run that made it."""
    identity = cache.manifest.identity
    return {
        "version": __version__,
        "cache_identity": config.cache_identity,
        "cache_fingerprint": config.cache_fingerprint,
        "heldout_share": config.recipe.heldout_share,
        "label_source": config.recipe.label_source,
        "steps": step,
        "target_dtype": config.target_dtype,
        "target_fingerprint": identity.target_fingerprint,
        "tokenizer_hash": identity.tokenizer_hash,
    }


def peak_bytes(device: torch.device) -> int:
    """Return the peak resident memory of this process, or the peak of a GPU's allocator."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _slot_accuracy(hits_N: Tensor, slots_N: Tensor, block_size: int) -> list[float | None]:
    counts = torch.bincount(slots_N, minlength=block_size)[1:]
    right = torch.bincount(slots_N[hits_N], minlength=block_size)[1:]
    return [round(int(r) / int(n), 4) if n else None for r, n in zip(right, counts, strict=True)]


def _describe(config: ResolvedConfig, device: torch.device, say: Callable[[str], None]) -> None:
    drafter = config.drafter
    say(
        f"drafter: {drafter.num_layers} layers, hidden {drafter.hidden_size}, block {drafter.block_size}, "
        f"mask token {drafter.mask_token_id}, context layers {list(drafter.context_layer_ids)}, "
        f"labels {config.recipe.label_source}"
    )
    say(
        f"run: {config.steps} steps, lr {config.lr:g} after {config.warmup_steps} warmup steps, "
        f"{config.precision} on {device}"
    )


def _progress_line(step: int, steps: int, metrics: dict[str, Any], elapsed: float, done: int, wait: float) -> str:
    left = int((steps - step) * elapsed / max(1, done))
    line = f"step {step}/{steps}  loss {metrics['loss']:.3f}  first slot {metrics['slot_accuracy'][0] or 0:.3f}"
    if "heldout" in metrics:
        line += f"  held-out tau {metrics['heldout']['tau']['micro']:.3f}"
    return f"{line}  waiting for data {wait / max(elapsed, 1e-9):.1%}  {left // 60}:{left % 60:02d} left"
