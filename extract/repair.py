"""`dflash cache repair`: what is damaged in a cache is computed again from its corpus and target, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import CacheMismatch, ConfigError
from ..store.bucket import is_url
from ..store.bucket_repair import repairing
from ..store.identity import Identity
from ..store.integrity import manifest_of, verify
from ..store.jsonfile import digest_bytes, seal
from ..store.layout import TARGET, plan_file, stats_file
from ..store.manifest import Manifest
from ..store.plan import Plan, read_plan, write_plan
from ..store.progress import Bar, no_bar
from ..store.record import ShardRecord
from ..store.replace import replace_manifest, replace_shard, replace_target
from ..store.source import open_source
from ..target import Target, describe_target, load_target
from .config import ExtractConfig
from .corpus import read_corpus
from .forward import compute_shard
from .planning import PlacedRows, Weights, make_identity, plan_parts
from .progress import Progress, SilentProgress
from .run import package_versions, target_head
from .sources import open_sources


@dataclass(frozen=True, kw_only=True)
class RepairConfig:
    """What `dflash cache repair` is told.

    Attributes:
        cache: a finished cache, or its URL.
        corpus: the corpus files it was extracted from, in the same order; wherever they are now.
        target: the target's folder or name now; None where the recorded name still leads to it.
        device: `auto`, `cpu`, `cuda`, `cuda:N`.
        trust_remote_code: as transformers takes it.
    """

    cache: Path | str
    corpus: tuple[Path | str, ...] = ()
    target: str | None = None
    device: str = "auto"
    trust_remote_code: bool = False


def run_repair(config: RepairConfig, progress: Progress | None = None, bar: Bar = no_bar) -> dict[str, Any]:
    """Verify a cache, compute its bad shards and files again, and verify it once more.

    A shard computed on the same machine by the same versions has the same bytes, and the cache its old fingerprint.
    Elsewhere its last bits may differ: the fingerprint changes and the manifest lists the old one as a parent.

    Returns:
        cache, ok, repaired_shards, repaired_files (outside the shards), fingerprint, previous_fingerprint, problems
        (what was wrong, one line each), seconds.

    Raises:
        ConfigError: something must be computed again, and the corpus or the target is not given.
        CacheMismatch: corpus or target are not those of the cache, the message names the field; or another process
            has changed the cache while it was verified.
        CacheMissing, CacheCorrupt: the manifest is gone or damaged: the same `dflash extract` builds it again.
        CorpusError, TargetError: they cannot be read.

    Writes into the cache, with its lock or its claim held.
    """
    started = time.monotonic()
    progress = progress or SilentProgress()
    place = str(config.cache) if is_url(config.cache) else Path(config.cache).absolute()
    manifest = manifest_of(open_source(place))
    found = verify(place, bar=bar)
    result = {
        "cache": str(config.cache),
        "ok": True,
        "repaired_shards": found["bad_shards"],
        "repaired_files": found["bad_files"],
        "fingerprint": manifest.fingerprint,
        "previous_fingerprint": manifest.fingerprint,
        "problems": found["problems"],
    }
    if not found["ok"]:
        bad = found["bad_shards"], found["bad_files"]
        with repairing(place, manifest, *bad) as cache:
            repaired = _repair(config, cache, manifest, *bad, progress)
        result["ok"] = verify(place, bar=bar)["ok"]
        result["fingerprint"] = repaired.fingerprint
    return {**result, "seconds": time.monotonic() - started}


def _repair(
    config: RepairConfig,
    cache: Path,
    manifest: Manifest,
    bad_shards: Sequence[int],
    bad_files: Sequence[str],
    progress: Progress,
) -> Manifest:
    records: dict[int, ShardRecord] = {}
    plan_name, stats_name = plan_file(manifest.generation), stats_file(manifest.generation)
    if not bad_shards and set(bad_files) <= {stats_name}:  # sums of sums that the shards still have
        plan = read_plan(cache, manifest.generation)
        return replace_manifest(cache, plan, manifest, records, manifest.versions)
    _check_given(config, manifest.identity, bad_shards, bad_files)
    target, plan, rows = _plan_again(config, cache, manifest, plan_name in bad_files, progress)
    if plan_name in bad_files:
        write_plan(cache, plan)
    if any(name.startswith(f"{TARGET}/") for name in bad_files):
        replace_target(cache, target_head(target), target.save_files)
    num_tokens = sum(int(plan.num_tokens[row]) for shard in bad_shards for row in plan.shard_slice(shard))
    progress.start(num_tokens, 0)
    try:
        for shard in bad_shards:
            sound, dropped = compute_shard(target, plan, rows, shard, progress)
            records[shard] = replace_shard(cache, plan, shard, sound, dropped)
    finally:
        progress.stop()
    return replace_manifest(cache, plan, manifest, records, package_versions())


def _check_given(config: RepairConfig, identity: Identity, bad_shards: Sequence[int], bad_files: Sequence[str]) -> None:
    if config.corpus and config.target:
        return
    damaged = [f"shard {shard}" for shard in bad_shards] + list(bad_files)
    lacking = [
        *(["--corpus " + " --corpus ".join(file.name for file in identity.corpus)] if not config.corpus else []),
        *([f"--target {identity.target_name}"] if not config.target else []),
    ]
    raise ConfigError(
        f"{config.cache}: {', '.join(damaged[:5])}{', ...' if len(damaged) > 5 else ''} must be computed again from "
        f"the corpus and the target: give {' and '.join(lacking)}, wherever they are now"
    )


def _plan_again(
    config: RepairConfig, cache: Path, manifest: Manifest, plan_is_bad: bool, progress: Progress
) -> tuple[Target, Plan, PlacedRows]:
    """Load the target, read the corpus, and make the plan again; all must be what the manifest says."""
    identity = manifest.identity
    settings = ExtractConfig(
        corpus=config.corpus,
        target=str(config.target),
        out=cache,
        layers=",".join(map(str, identity.layer_ids)),
        max_length=identity.max_length,
        codec=identity.codec,
        dtype=identity.dtype,
        attention=identity.attention,
        device=config.device,
        batch_tokens=identity.batch_tokens,
        shard_tokens=identity.shard_tokens,
        top_k=identity.top_k,
        keep_final=identity.keep_final,
        limit_rows=identity.limit_rows,
        limit_tokens=identity.limit_tokens,
        revision=identity.target_revision,
        trust_remote_code=config.trust_remote_code,
    )
    description = describe_target(settings.target_config())
    sources = open_sources(settings.corpus)
    target = load_target(settings.target_config(), description)
    for notice in target.notices:
        progress.notice(notice)
    files = tuple(source.file for source in sources)
    found = make_identity(
        settings, description, Weights.of(target, settings), files, identity.layer_ids, identity.max_length
    )
    differences = replace(identity, appended=()).differences(found)
    if differences:
        name, expected, given = differences[0]
        raise CacheMismatch(
            f"{config.cache}: {name} is not that of the cache: {given} given, {expected} in the cache; repair needs "
            "the very corpus files, in their order, and the very target it was extracted with"
        )
    parts, first = [], 0
    for count in identity.part_files:
        corpus = read_corpus(
            sources[first : first + count],
            description.tokenizer,
            vocab_size=description.vocab_size,
            max_length=identity.max_length,
            limit_rows=identity.limit_rows,
            limit_tokens=identity.limit_tokens,
            earlier=[source.name for source in sources[:first]],
        )
        parts.append(corpus)
        first += count
    plan, rows = plan_parts(identity, description, parts, cache)
    recorded = manifest.files[plan_file(manifest.generation)]
    if plan_is_bad:
        data = seal(plan.fields())
        same = (len(data), digest_bytes(data)) == (recorded.num_bytes, recorded.xxh3)
    else:
        same = read_plan(cache, manifest.generation).digest == plan.digest
    if not same:
        raise CacheMismatch(
            f"{config.cache}: the rows planned now differ from those of the cache, though its inputs are "
            "the same: another version of transformers tokenizes otherwise; install what `dflash cache info` lists"
        )
    return target, plan, rows
