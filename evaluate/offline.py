"""Offline tau: a drafter walked over the rows of a cache as decoding would walk it, without the target."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..drafter.checkpoint import LoadedDrafter, load_drafter
from ..drafter.config import DrafterConfig
from ..drafter.device import choose_device
from ..errors import CheckpointError, ConfigError, counted
from ..store import CacheReader, open_cache
from ..store.splits import SPLITS, split_rows
from .baselines import Baselines, TokenRow, lookup_tau, ngram_baselines, read_token_rows
from .compare import check_comparable, comparison, unseen_rows
from .diagnose import Diagnosis
from .fit import check_sizes
from .locate import locate_drafter
from .measure import FrozenHead
from .report import check_report, training_curve, write_report
from .sources import UNNAMED, by_source, read_sources, sample_rows
from .trees import check_budgets
from .walks import Say, measure_rows


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """One offline evaluation.

    Attributes:
        drafter: a drafter's folder in z-lab's layout, a checkpoint's, or a run's.
        cache: the rows and states to evaluate on.
        split: heldout, train or all; None is heldout where the drafter was trained on this cache, else all.
        baseline_cache: where the free n-gram's training rows are; None: the evaluated cache.
        against: another drafter to compare with, on the same rows.
        diagnose: also look behind the figures (`Diagnosis`); walks every row twice.
        sources: corpus files whose field `source` breaks the figures down (`read_sources`).
        samples: show so many rows, of each source, with the drafts accepted in them.
        report: HTML file to write beside the figures.
        tree_budgets: also walk with trees of so many nodes; each needs the whole head at every slot.
        device: auto, cpu, cuda or cuda:N.

    Raises:
        ConfigError: the split is unknown, or a number is out of range.
    """

    drafter: Path
    cache: Path | str
    split: str | None = None
    baseline_cache: Path | str | None = None
    against: Path | None = None
    diagnose: bool = False
    sources: tuple[Path, ...] = ()
    samples: int = 0
    report: Path | None = None
    tree_budgets: tuple[int, ...] = ()
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.split is not None and self.split not in SPLITS:
            raise ConfigError(f"split {self.split!r}: expected one of {', '.join(SPLITS)}")
        if self.samples < 0:
            raise ConfigError(f"samples {self.samples}: expected at least 0")
        object.__setattr__(self, "tree_budgets", check_budgets(self.tree_budgets))


def run_evaluate(config: EvaluateConfig, say: Say) -> dict[str, Any]:
    """Evaluate a drafter on the rows of a cache.

    Args:
        config: see `EvaluateConfig`.
        say: takes lines for people: progress and notices.

    Returns:
        The JSON object of `dflash evaluate --json`: rows, verifications, tokens, tau {micro, macro, ci95},
        per_slot_accuracy, acceptance_rate, on_policy_share, estimate, top_m_tau, tree, baselines, and what was
        evaluated; with `diagnose` what `Diagnosis.summary` returns, with `against` the object of that name
        (`comparison`), with `sources` figures by source, with `samples` what `sample_rows` returns.

    Raises:
        CheckpointError, CacheMissing, CacheCorrupt, CorpusError: the drafter, the cache or a corpus cannot be read.
        ConfigError: they do not fit each other, or the split has no rows.
    """
    started = time.perf_counter()
    if config.report:
        check_report(config.report)
    device = choose_device(config.device)
    directory = locate_drafter(config.drafter)
    drafter = load_drafter(directory)
    cache = open_cache(config.cache)
    check_match(drafter.config, cache)
    other = _load_other(config.against, directory, drafter, cache) if config.against else None
    split, rows = choose_rows(config.split, drafter, cache, other.drafter if other else None)
    say(f"{directory}: {counted(len(rows), 'row')} ({split}) of {config.cache}")
    row_ids = [cache.row_ids[index] for index in rows.tolist()]
    named = read_sources(config.sources, row_ids) if config.sources else dict.fromkeys(row_ids, UNNAMED)
    sources = [named[row_id] for row_id in row_ids]
    model = drafter.model.to(device)
    head = FrozenHead.of(cache.head(), model.fc.weight)
    diagnosis = Diagnosis(model, head) if config.diagnose else None
    observers = [diagnosis.add] if diagnosis else []
    figures = measure_rows(model, head, cache, rows, say, observers, config.tree_budgets)
    extras: dict[str, Any] = {}
    if config.sources:
        extras["sources"] = by_source(figures.walks, sources, drafter.config.block_size)
    if config.samples:
        extras["samples"] = sample_rows(
            figures.rows, figures.walks, row_ids, sources, per_source=config.samples, target_dir=cache.target_dir
        )
    if diagnosis:
        extras |= diagnosis.summary(cache, figures.on_policy / figures.supervised)
    if other:
        say(f"{other.directory}: the same rows")
        theirs = measure_rows(other.drafter.model.to(device), head, cache, rows, say, [])
        extras["against"] = comparison(other.directory, figures, theirs, other.drafter)
    baselines = _baselines(config, drafter, cache, figures.rows)
    result = {
        "drafter": str(directory),
        "cache": str(config.cache),
        "cache_fingerprint": cache.fingerprint,
        "drafter_cache_fingerprint": drafter.extra.get("cache_fingerprint"),
        "split": split,
        "block_size": drafter.config.block_size,
        **figures.summary(drafter.config.block_size),
        **extras,
        "baselines": {
            **baselines.taus,
            "prompt_lookup": lookup_tau(figures.rows, block_size=drafter.config.block_size),
        },
        "baselines_note": baselines.note,
        "seconds": time.perf_counter() - started,
    }
    if config.report:
        write_report(config.report, result, training_curve(directory))
        say(f"{config.report}: written")
    return result


def check_match(drafter: DrafterConfig, cache: CacheReader) -> None:
    """Refuse a cache that is not of the drafter's target or lacks states that it reads.

    Raises:
        ConfigError: a size differs, or a context layer is not in the cache.
    """
    target = cache.target_config()
    num_layers = (target.get("text_config") or target).get("num_hidden_layers")
    check_sizes(
        drafter,
        str(cache.place),
        hidden_size=cache.hidden_size,
        vocab_size=cache.vocab_size,
        num_layers=num_layers or drafter.num_target_layers,
    )
    missing = [layer for layer in drafter.context_layer_ids if layer not in cache.layer_ids]
    if missing:
        layers = ",".join(str(layer) for layer in sorted({*cache.layer_ids, *missing}))
        raise ConfigError(
            f"{cache.place}: the drafter reads layers {list(drafter.context_layer_ids)}, the cache holds "
            f"{list(cache.layer_ids)}; extract one with --layers {layers}"
        )


class _Other(NamedTuple):
    directory: Path
    drafter: LoadedDrafter


def _load_other(path: Path, directory: Path, drafter: LoadedDrafter, cache: CacheReader) -> _Other:
    """Load the drafter to compare with; refuse it, or the first one, where the two are not comparable."""
    other = _Other(locate_drafter(path), load_drafter(locate_drafter(path)))
    check_match(other.drafter.config, cache)
    check_comparable(directory, drafter, cache)
    check_comparable(other.directory, other.drafter, cache)
    return other


def choose_rows(
    split: str | None, drafter: LoadedDrafter, cache: CacheReader, other: LoadedDrafter | None = None
) -> tuple[str, NDArray[np.int64]]:
    """Return the split's name and the indices of its rows that have an anchor.

    Where an `other` drafter is compared, held-out rows are held out from both: what either saw is no fair test.

    Raises:
        ConfigError: the split has no such rows, or the drafter does not say what was held out from it.
        CheckpointError: what the drafter records of its run is not a share.
    """
    own = [each for each in (drafter, other) if each and each.extra.get("cache_identity") == cache.identity]
    split = split or ("heldout" if own else "all")
    drafter = own[0] if own else drafter
    share = drafter.extra.get("heldout_share")
    if split != "all" and share is None:
        raise ConfigError(f"split {split}: this drafter does not say which share of rows was held out; use --split all")
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1):
        raise CheckpointError(f"config.json: heldout_share must be a number from 0 to below 1, found {share!r}")
    rows = split_rows(cache.prompt_hash, share or 0.0, split)
    rows = rows[cache.num_anchors[rows] > 0]
    if len(rows) == 0:
        held = f" (held-out share {share:g})" if share is not None and split != "all" else ""
        remedy = "extract rows whose replies have two tokens or more" if split == "all" else "try --split all"
        raise ConfigError(f"{cache.place}: no row to evaluate in split {split}{held}; {remedy}")
    if other and split == "heldout":
        rows = unseen_rows(rows, other, cache)
    return split, rows


def _baselines(config: EvaluateConfig, drafter: LoadedDrafter, cache: CacheReader, rows: list[TokenRow]) -> Baselines:
    """Fit on the training rows of the baseline cache; of a cache that the drafter never saw, on all of its rows."""
    source = open_cache(config.baseline_cache) if config.baseline_cache else cache
    if source.manifest.identity.tokenizer_hash != cache.manifest.identity.tokenizer_hash:
        raise ConfigError(f"{source.place}: its tokenizer is not that of {cache.place}; no n-gram of it can draft here")
    own = drafter.extra.get("cache_identity") == source.identity
    fit = split_rows(source.prompt_hash, drafter.extra.get("heldout_share") or 0.0, "train" if own else "all")
    block_size = drafter.config.block_size
    return ngram_baselines(read_token_rows(source, fit), rows, vocab_size=cache.vocab_size, block_size=block_size)
