"""`dflash extract`: the target reads a corpus once, and everything a trainer needs of it goes into a cache."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from ..errors import ConfigError, counted
from ..store import CacheWriter, Plan, TargetHead
from ..store.bucket import is_url
from ..store.bucket_writer import BucketWriter
from ..store.manifest import Manifest, read_manifest
from ..store.render import size
from ..target import (
    Target,
    TargetDescription,
    describe_target,
    load_target,
    parse_layer_ids,
    stored_weights,
)
from .config import ExtractConfig
from .corpus import CorpusRows, read_corpus
from .estimate import check_space, check_work_space, estimate_bytes, free_bytes
from .fill import Reporter, extract_shards
from .planning import (
    Weights,
    check_place,
    earlier_files,
    is_finished,
    make_identity,
    make_plan,
    plan_append,
    refuse_early,
)
from .progress import Progress, SilentProgress
from .rows import CorpusRow
from .sources import Source, open_sources
from .workers import started_workers

PACKAGES = ("dflash-pipeline", "numpy", "tokenizers", "torch", "transformers", "zarr")


def run_extract(config: ExtractConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Extract a cache, or go on with one that was interrupted.

    Args:
        config: what to extract, from what, to where.
        progress: where to report; nowhere by default.

    Returns:
        The object that `--json` prints: cache, rows, tokens, resumed_rows, skipped (reason: count), skipped_places
        (reason: file:line of the first thousand), duplicates, dropped, seconds, tokens_per_second (of the forwards of
        this run, all workers together; 0 where none was left), state_bytes, raw_state_bytes, estimated_bytes,
        identity, fingerprint, notices. Of a dry run: rows, tokens, estimated_bytes, free_bytes, skipped,
        skipped_places, duplicates, notices.

    Raises:
        CorpusError: the corpus cannot be read, or has no usable row.
        TargetError: the target cannot be loaded or is not understood, or all of its states are faulty.
        ConfigError: an option does not fit the target, or the disk is too small.
        CacheMismatch: the output holds a cache made from other inputs.
        CacheMissing: there is no finished cache to extend.

    Writes the cache at `config.out`; where that is a URL, through `config.folder`.
    """
    started = time.monotonic()
    reporter = Reporter(progress or SilentProgress())
    local = not is_url(config.out)
    check_place(config)
    sources = open_sources(config.corpus)
    description = describe_target(config.target_config())
    layer_ids, max_length = _resolve(config, description)
    if local and not config.dry_run:
        files = tuple(source.file for source in sources)
        refuse_early(config, description, files, layer_ids, max_length)
    corpus = _read(config, sources, description, max_length, reporter)
    finished = is_finished(config, sources)
    estimated = _estimate(config, description, corpus, len(layer_ids), finished, reporter)
    if config.dry_run:
        return {
            "rows": len(corpus.rows),
            "tokens": corpus.num_tokens,
            "estimated_bytes": estimated,
            "free_bytes": free_bytes(config.folder),
            "skipped": corpus.skipped,
            "skipped_places": corpus.skipped_places,
            "duplicates": corpus.num_duplicates,
            "notices": reporter.notices,
        }
    unchanged = _unchanged(config, description, corpus, layer_ids, max_length) if local and finished else None
    if unchanged is not None:
        return _result(config, corpus, unchanged, reporter, started, estimated)
    if not finished:
        _check_room(config, description, corpus, len(layer_ids), estimated)
    target = load_target(config.target_config(), description)
    reporter.extend(target.notices)
    plan, rows = _plan(config, description, Weights.of(target, config), corpus, layer_ids, max_length)
    with _open_writer(config, plan, target) as writer:
        resumed_rows = writer.resumed_rows
        reporter.extend(writer.take_notices())
        reporter.extend([f"computing shard {shard} again: {why}" for shard, why in writer.replaced_shards.items()])
        with started_workers(config, run_extract) if writer.missing_shards else nullcontext(list) as failures:
            rate = extract_shards(target, plan, rows, writer, reporter)
            manifest = writer.finish()
            reporter.extend(failures())
    return _result(config, corpus, manifest, reporter, started, estimated) | {
        "resumed_rows": resumed_rows,
        "tokens_per_second": rate,
    }


def _result(
    config: ExtractConfig,
    corpus: CorpusRows,
    manifest: Manifest,
    reporter: Reporter,
    started: float,
    estimated: int,
) -> dict[str, Any]:
    """Return what `run_extract` does of a finished cache, all of it there before."""
    return {
        "cache": str(config.out),
        "rows": manifest.num_rows,
        "tokens": manifest.num_tokens,
        "resumed_rows": manifest.num_rows + sum(manifest.dropped.values()),
        "skipped": dict(manifest.skipped),
        "skipped_places": corpus.skipped_places,
        "duplicates": corpus.num_duplicates,
        "dropped": dict(manifest.dropped),
        "seconds": time.monotonic() - started,
        "tokens_per_second": 0.0,
        "state_bytes": manifest.state_bytes,
        "raw_state_bytes": manifest.raw_state_bytes,
        "estimated_bytes": estimated,
        "identity": manifest.identity_digest,
        "fingerprint": manifest.fingerprint,
        "notices": reporter.notices,
    }


def _resolve(config: ExtractConfig, description: TargetDescription) -> tuple[tuple[int, ...], int | None]:
    """Return the layer ids and the length limit that the settings mean for this target."""
    layer_ids = parse_layer_ids(config.layers, description.num_layers)
    if config.top_k > description.vocab_size:
        raise ConfigError(f"top_k {config.top_k}: the target's vocabulary has {description.vocab_size} entries")
    limits = [limit for limit in (config.max_length, description.max_length) if limit is not None]
    return layer_ids, min(limits) if limits else None


def _read(
    config: ExtractConfig,
    sources: Sequence[Source],
    description: TargetDescription,
    max_length: int | None,
    reporter: Reporter,
) -> CorpusRows:
    corpus = read_corpus(
        sources,
        description.tokenizer,
        vocab_size=description.vocab_size,
        max_length=max_length,
        limit_rows=config.limit_rows,
        limit_tokens=config.limit_tokens,
        strict=config.strict,
        earlier=earlier_files(config.folder, sources) if config.append else (),
    )
    if config.max_length is not None and max_length != config.max_length:
        reporter.extend(
            [f"the target reads at most {max_length} tokens, so --max-length {config.max_length} is {max_length}"]
        )
    reporter.extend(corpus.notices())
    return corpus


def _plan(
    config: ExtractConfig,
    description: TargetDescription,
    weights: Weights,
    corpus: CorpusRows,
    layer_ids: tuple[int, ...],
    max_length: int | None,
) -> tuple[Plan, dict[int, CorpusRow]]:
    """Return the cache's plan, and the corpus' rows by their place in it."""
    identity = make_identity(config, description, weights, corpus.files, layer_ids, max_length)
    plan, rows = make_plan(identity, description, corpus)
    if config.append:
        plan = plan_append(config.folder, plan)
    return plan, dict(enumerate(rows, plan.num_rows - len(rows)))


def _unchanged(
    config: ExtractConfig,
    description: TargetDescription,
    corpus: CorpusRows,
    layer_ids: tuple[int, ...],
    max_length: int | None,
) -> Manifest | None:
    """Return the manifest of a finished cache of these very inputs, found without loading the target.

    None where only a loaded target tells, or where its weights differ: the way of an unfinished cache refuses that.
    """
    found = read_manifest(config.folder).identity
    weights = stored_weights(config.target_config(), description)
    if weights is None or weights != (found.target_fingerprint, found.attention):
        return None
    plan, _ = _plan(config, description, Weights(*weights), corpus, layer_ids, max_length)
    return CacheWriter.reopen(config.folder, plan)


def _open_writer(config: ExtractConfig, plan: Plan, target: Target) -> CacheWriter:
    head, versions = target_head(target), package_versions()
    if not is_url(config.out):
        return CacheWriter.create_or_resume(config.out, plan, head, target.save_files, versions)
    first = config.for_worker(0)
    return BucketWriter.join(
        str(config.out),
        config.folder,
        plan,
        head,
        target.save_files,
        versions,
        lease_seconds=config.lease_seconds,
        rank=first.rank,
        world_size=first.world_size,
    )


def _check_room(
    config: ExtractConfig, description: TargetDescription, corpus: CorpusRows, num_layers: int, estimated: int
) -> None:
    """Refuse a disk that is too small: for the cache, or on the way to a bucket for the head and a shard per worker."""
    if not is_url(config.out):
        check_space(config.folder, estimated)
        return
    longest = max(row.num_tokens for row in corpus.rows)
    shard_tokens = min(corpus.num_tokens, max(config.shard_tokens, longest))
    worker_bytes = estimate_bytes(config, description, num_layers, [shard_tokens])
    check_work_space(config.folder, config.num_workers * worker_bytes)


def _estimate(
    config: ExtractConfig,
    description: TargetDescription,
    corpus: CorpusRows,
    num_layers: int,
    finished: bool,
    reporter: Reporter,
) -> int:
    there = read_manifest(config.folder).num_bytes if config.append else 0
    if config.append and finished:
        estimated, what = there, ", in the cache already: all of it takes"
    else:
        estimated = estimate_bytes(config, description, num_layers, [row.num_tokens for row in corpus.rows])
        what = f" to add: with the {size(there)} that are there" if config.append else ":"
        what += " the cache takes about"
    reporter.progress.notice(
        f"{counted(len(corpus.rows), 'row')}, {counted(corpus.num_tokens, 'token')}{what} {size(estimated)}, "
        f"{size(free_bytes(config.folder))} are free" + (f" in {config.folder}" if is_url(config.out) else "")
    )
    return estimated


def target_head(target: Target) -> TargetHead:
    """Return the target's head as the store takes it."""
    embed_tokens, lm_head, norm, eps = target.head_tensors()
    return TargetHead(embed_tokens=embed_tokens, lm_head=lm_head, norm=norm, norm_eps=eps)


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that decide a cache's bits."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}
