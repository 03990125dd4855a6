"""`dflash extract`: the target reads a corpus once, and everything a trainer needs of it goes into a cache."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError
from ..store import CacheWriter, Plan, TargetHead
from ..target import Target, TargetDescription, describe_target, load_target, parse_layer_ids
from .config import ExtractConfig
from .corpus import CorpusRows, check_files, read_corpus
from .estimate import GIB, check_space, estimate_bytes, free_bytes
from .forward import compute_shard
from .planning import make_identity, make_plan
from .progress import Progress, SilentProgress
from .rows import CorpusRow

PACKAGES = ("dflash-pipeline", "numpy", "tokenizers", "torch", "transformers", "zarr")


def run_extract(config: ExtractConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Extract a cache, or go on with one that was interrupted.

    Args:
        config: what to extract, from what, to where.
        progress: where to report; nowhere by default.

    Returns:
        The object that `--json` prints: cache, rows, tokens, resumed_rows, skipped, dropped, seconds,
        tokens_per_second (of the forwards of this run; 0 where none was left), state_bytes, raw_state_bytes,
        estimated_bytes, identity, fingerprint, notices. Of a dry run: rows, tokens, estimated_bytes, free_bytes,
        skipped, notices.

    Raises:
        CorpusError: the corpus cannot be read, or has no usable row.
        TargetError: the target cannot be loaded or is not understood, or all of its states are faulty.
        ConfigError: an option does not fit the target, or the disk is too small.
        CacheMismatch: the output holds a cache made from other inputs.

    Writes the cache at `config.out`.
    """
    started = time.monotonic()
    reporter = _Reporter(progress or SilentProgress())
    check_files(config.corpus)
    description = describe_target(config.target_config())
    layer_ids, max_length = _resolve(config, description)
    corpus = _read(config, description, max_length, reporter)
    estimated = _estimate(config, description, corpus, len(layer_ids), reporter)
    if config.dry_run:
        return {
            "rows": len(corpus.rows),
            "tokens": corpus.num_tokens,
            "estimated_bytes": estimated,
            "free_bytes": free_bytes(config.out),
            "skipped": corpus.skipped,
            "notices": reporter.notices,
        }
    check_space(config.out, estimated)
    target = load_target(config.target_config(), description)
    reporter.extend(target.notices)
    plan, rows = make_plan(make_identity(config, target, corpus, layer_ids, max_length), target, corpus)
    head, versions = target_head(target), package_versions()
    with CacheWriter.create_or_resume(config.out, plan, head, target.save_files, versions) as writer:
        resumed_rows = writer.resumed_rows
        reporter.extend([f"computing shard {shard} again: {why}" for shard, why in writer.replaced_shards.items()])
        rate = _extract_shards(target, plan, rows, writer, reporter)
        manifest = writer.finish()
    return {
        "cache": str(config.out),
        "rows": manifest.num_rows,
        "tokens": manifest.num_tokens,
        "resumed_rows": resumed_rows,
        "skipped": dict(manifest.skipped),
        "dropped": dict(manifest.dropped),
        "seconds": time.monotonic() - started,
        "tokens_per_second": rate,
        "state_bytes": manifest.state_bytes,
        "raw_state_bytes": manifest.raw_state_bytes,
        "estimated_bytes": estimated,
        "identity": manifest.identity_digest,
        "fingerprint": manifest.fingerprint,
        "notices": reporter.notices,
    }


class _Reporter:
    """Passes notices on to the progress display and keeps them for the result."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.notices: list[str] = []

    def extend(self, notices: Sequence[str]) -> None:
        for notice in notices:
            self.notices.append(notice)
            self.progress.notice(notice)


def _resolve(config: ExtractConfig, description: TargetDescription) -> tuple[tuple[int, ...], int | None]:
    """Return the layer ids and the length limit that the settings mean for this target."""
    layer_ids = parse_layer_ids(config.layers, description.num_layers)
    if config.top_k > description.vocab_size:
        raise ConfigError(f"top_k {config.top_k}: the target's vocabulary has {description.vocab_size} entries")
    limits = [limit for limit in (config.max_length, description.max_length) if limit is not None]
    return layer_ids, min(limits) if limits else None


def _read(
    config: ExtractConfig, description: TargetDescription, max_length: int | None, reporter: _Reporter
) -> CorpusRows:
    corpus = read_corpus(
        config.corpus,
        description.tokenizer,
        vocab_size=description.vocab_size,
        max_length=max_length,
        limit_rows=config.limit_rows,
        limit_tokens=config.limit_tokens,
        strict=config.strict,
    )
    if config.max_length is not None and max_length != config.max_length:
        reporter.extend(
            [f"the target reads at most {max_length} tokens, so --max-length {config.max_length} is {max_length}"]
        )
    reporter.extend(corpus.notices())
    return corpus


def _estimate(
    config: ExtractConfig, description: TargetDescription, corpus: CorpusRows, num_layers: int, reporter: _Reporter
) -> int:
    estimated = estimate_bytes(config, description, num_layers, corpus.num_tokens, len(corpus.rows))
    reporter.progress.notice(
        f"{len(corpus.rows):,} rows, {corpus.num_tokens:,} tokens: the cache takes about {estimated / GIB:,.3f} GiB, "
        f"{free_bytes(config.out) / GIB:,.1f} GiB are free"
    )
    return estimated


def _extract_shards(
    target: Target, plan: Plan, rows: Sequence[CorpusRow], writer: CacheWriter, reporter: _Reporter
) -> float:
    """Compute and write the missing shards; return the tokens per second of this run."""
    missing = list(writer.missing_shards)
    num_tokens = int(plan.num_tokens.sum())
    num_missing = sum(int(plan.num_tokens[index]) for shard in missing for index in plan.shard_slice(shard))
    started = time.monotonic()
    reporter.progress.start(num_tokens, num_tokens - num_missing)
    try:
        for shard in missing:
            sound, dropped = compute_shard(target, plan, rows, shard, reporter.progress)
            writer.write_shard(shard, sound, dropped)
            reporter.extend([_drop_notice(shard, reason, ids) for reason, ids in dropped.items()])
    finally:
        reporter.progress.stop()
    return num_missing / max(time.monotonic() - started, 1e-9) if missing else 0.0


def _drop_notice(shard: int, reason: str, ids: Sequence[str]) -> str:
    more = ", ..." if len(ids) > 5 else ""
    return f"shard {shard}: dropped {len(ids)} rows: {reason}: {', '.join(ids[:5])}{more}"


def target_head(target: Target) -> TargetHead:
    """Return the target's head as the store takes it."""
    embed_tokens, lm_head, norm, eps = target.head_tensors()
    return TargetHead(embed_tokens=embed_tokens, lm_head=lm_head, norm=norm, norm_eps=eps)


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that decide a cache's bits."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}
