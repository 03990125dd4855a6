"""The training run: cache in, drafter out. The target model is never loaded."""

from __future__ import annotations

import math
import platform
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from filelock import FileLock, Timeout

from .. import __version__
from ..drafter.checkpoint import save_drafter
from ..errors import CacheMismatch, DflashError
from ..store import CacheReader, open_cache
from .checkpoint import save_checkpoint
from .config import ResolvedConfig
from .data import open_steps
from .facts import resolve_for, training_rows, whole_block_share
from .heldout import HeldOut
from .optimizer import whole_moments
from .parallel import Ranks, check_packs, join_ranks
from .progress import Clock, describe_run
from .recipe import Recipe
from .run_folder import DRAFTER, RunFolder
from .tracker import Tracker, numbers, open_tracker
from .trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """One call of `dflash train`: where to read and write, and how; what is trained is the recipe's."""

    cache: Path | str
    out: Path
    recipe: Recipe
    num_workers: int = 1
    device: str = "auto"


def run_train(options: TrainOptions, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Train a drafter, or go on where an interrupted run of the same settings stopped.

    Under torchrun this is one rank of many: the first one writes and speaks. SIGTERM ends the step at hand, saves, and
    returns; so does SIGINT (Ctrl-C), which then raises KeyboardInterrupt. A second SIGINT saves nothing.

    Args:
        options: see `TrainOptions`.
        say: takes lines for people.

    Returns:
        run, steps, final_loss, seconds, step_seconds, data_wait_seconds, peak_bytes, and more; None on other ranks
        than the first.

    Raises:
        DflashError: the settings, the cache or the run folder are not valid, or the loss is not finite.
    """
    with join_ranks(options.device) as ranks, ExitStack() as stack:
        cache = open_cache(options.cache)
        folder = RunFolder(options.out)
        say = say if ranks.is_first else lambda _line: None
        config = _start(options, cache, folder, ranks, stack, say)
        finished = folder.result()
        if finished is not None:
            say(f"{options.out}: this run is finished already")
            return finished if ranks.is_first else None
        return _train(options, cache, folder, config, ranks, say)


def _start(
    options: TrainOptions,
    cache: CacheReader,
    folder: RunFolder,
    ranks: Ranks,
    stack: ExitStack,
    say: Callable[[str], None],
) -> ResolvedConfig:
    """Resolve the settings and lock and begin the folder, on the first rank; the others then take what it saved."""
    problem: DflashError | None = None
    if ranks.is_first:
        try:
            config = resolve_for(options.recipe, cache, folder, ranks.device, ranks.size)
            check_packs(config.packs_per_step, ranks)
            options.out.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(FileLock(options.out / ".lock", timeout=0))
            except Timeout:
                raise CacheMismatch(f"{options.out}: another process is training into this folder") from None
            versions = {"version": __version__, "torch": torch.__version__, "python": platform.python_version()}
            for notice in folder.start(config, versions):
                say(notice)
        except DflashError as error:
            problem = error
    if ranks.sums([float(problem is not None)])[0]:
        raise problem or DflashError("stopped: the first rank says why")
    return config if ranks.is_first else resolve_for(options.recipe, cache, folder, ranks.device, ranks.size)


def _train(
    options: TrainOptions,
    cache: CacheReader,
    folder: RunFolder,
    config: ResolvedConfig,
    ranks: Ranks,
    say: Callable[[str], None],
) -> dict[str, Any] | None:
    table = training_rows(cache, config.recipe.heldout_share)
    describe_run(config, ranks, whole_block_share(table, config.drafter.block_size), say)
    trainer = Trainer(cache, config, ranks, options.out)
    step = trainer.first_step
    if ranks.is_first:
        folder.forget_metrics_after(step)
    if not step and (trainer.mask_logit or 0.0) > math.log(config.drafter.vocab_size):
        say(
            f"the head is tied to the embeddings, so slots begin by saying the mask token itself (logit "
            f"{trainer.mask_logit:.0f}): the first losses are about as high, and fall within tens of steps"
        )
    if step:
        say(f"resumed after step {step} of {config.steps}")
    heldout = HeldOut(cache, config, trainer.head)
    if config.recipe.heldout_share and not heldout.num_rows:
        say(f"heldout_share = {config.recipe.heldout_share:g} holds no row out: no tau is measured on the way")
    clock = Clock(config, step)
    metrics: dict[str, Any] = {"loss": float("nan")}
    stopped = False
    reading = open_steps(
        cache,
        table,
        config,
        first_step=step,
        num_workers=options.num_workers,
        rank=ranks.rank,
        num_ranks=ranks.size,
    )
    with reading as steps, _tracking(options, config, ranks, step) as tracker, _stopping() as stopping:
        while step < config.steps and not stopped:
            with clock.waiting():
                packs = next(steps)
            weight, stop, save = ranks.sums(
                [
                    sum(float(pack.supervision.weights_N.sum()) for pack in packs),
                    float(stopping.signal is not None),
                    float(ranks.is_first and clock.checkpoint_due()),
                ]
            )
            with clock.stepping():
                metrics = trainer.step(packs, step, weight)
            step += 1
            clock.count(metrics)
            stopped = bool(stop) or (ranks.size == 1 and stopping.signal is not None)
            last = step == config.steps
            if last or step % config.eval_every == 0:
                _measure(trainer, heldout, metrics)
            if ranks.is_first:
                folder.append_metrics({"step": step, **metrics})
                tracker.log(numbers(metrics), step)
            if last or save or stopped or step % config.checkpoint_every == 0:
                _save(trainer, cache, options.out, step)
                clock.saved()
            if last or "heldout" in metrics or clock.line_due():
                say(clock.line(step, metrics))
    result = _result(options, folder, config, ranks, clock, trainer, step, metrics)
    model = trainer.whole_model()
    if not ranks.is_first:
        return None
    if step < config.steps:
        say(f"stopped by {stopping.signal} after step {step} of {config.steps}, saved; the same command goes on")
        if stopping.signal == "SIGINT":
            raise KeyboardInterrupt
        return result
    save_drafter(options.out / DRAFTER, model, extra=drafter_record(config, cache, step))
    folder.finish(result)
    return result


def _measure(trainer: Trainer, heldout: HeldOut, metrics: dict[str, Any]) -> None:
    """Add the held-out figures to the metrics of the first rank; the others wait."""
    if not heldout.num_rows:
        return
    model = trainer.whole_model()
    if trainer.ranks.is_first:
        metrics["heldout"] = heldout.measure(model)
    trainer.ranks.wait()


def _save(trainer: Trainer, cache: CacheReader, out: Path, step: int) -> None:
    model, moments = trainer.whole_model(), whole_moments(trainer.model, trainer.optimizer)
    if trainer.ranks.is_first:
        record = drafter_record(trainer.config, cache, step)
        save_checkpoint(out, step, model, moments, record, trainer.config.recipe.keep_checkpoints)
    trainer.ranks.wait()


@contextmanager
def _tracking(options: TrainOptions, config: ResolvedConfig, ranks: Ranks, step: int) -> Iterator[Tracker]:
    name = config.recipe.tracker if ranks.is_first else "none"
    tracker = open_tracker(name, options.out, asdict(config.recipe), step)
    try:
        yield tracker
    finally:
        tracker.close()


class _Stop:
    """Which signal has asked the run to stop, if any."""

    signal: str | None = None

    def ask(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == "SIGINT":
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name


@contextmanager
def _stopping() -> Iterator[_Stop]:
    """Take SIGTERM and SIGINT as requests to stop; outside the main thread, where no handler can be set, none comes."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _result(
    options: TrainOptions,
    folder: RunFolder,
    config: ResolvedConfig,
    ranks: Ranks,
    clock: Clock,
    trainer: Trainer,
    step: int,
    metrics: dict[str, Any],
) -> dict[str, Any]:
    return {
        "run": str(options.out),
        "steps": step,
        "finished": step == config.steps,
        "final_loss": metrics["loss"],
        "seconds": clock.seconds,
        "step_seconds": clock.step_seconds / max(1, step - trainer.first_step),
        "data_wait_seconds": clock.wait_seconds,
        "peak_bytes": peak_bytes(ranks.device),
        "resumed_from": trainer.first_step,
        "ranks": ranks.size,
        "precision": config.precision,
        "lr": config.lr,
        "mask_token_id": config.drafter.mask_token_id,
        "num_parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "heldout": folder.heldout_curve(),
        "cache_identity": config.cache_identity,
        "cache_fingerprint": config.cache_fingerprint,
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
