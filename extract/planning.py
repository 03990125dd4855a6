"""From corpus rows to the plan of a cache: identity, order, shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import DflashError
from ..store.append import check_same_settings, extend_plan, is_appended, refuse_difference
from ..store.begin import check_writable, refuse_strangers
from ..store.bucket import Bucket, is_url
from ..store.connect import check_url
from ..store.layout import CLAIMS, MANIFEST, PLAN
from ..store.manifest import check_manifest, read_manifest
from ..store.plan import CorpusFile, Identity, Plan, assign_rows, hash_prompt, read_plan
from ..target import Target, TargetDescription, attention_in_effect
from .config import ExtractConfig
from .corpus import CorpusRows
from .rows import CorpusRow
from .sources import Source

PlacedRows = dict[int, CorpusRow]


class Weights(NamedTuple):
    """What a loaded target adds to its description: the digest of its weights, and its attention implementation."""

    fingerprint: str
    attention: str

    @classmethod
    def of(cls, target: Target, config: ExtractConfig) -> Weights:
        """Return those of a target that was loaded as the settings say."""
        return cls(target.fingerprint, attention_in_effect(target.config, config.attention))


def make_identity(
    config: ExtractConfig,
    description: TargetDescription,
    weights: Weights,
    files: tuple[CorpusFile, ...],
    layer_ids: tuple[int, ...],
    max_length: int | None,
) -> Identity:
    """Return everything that goes into the cache. `max_length` is the limit that was applied to the rows."""
    return Identity(
        target_name=description.name,
        target_revision=description.revision,
        target_fingerprint=weights.fingerprint,
        tokenizer_hash=description.tokenizer_hash,
        template_hash=description.template_hash,
        corpus=files,
        layer_ids=layer_ids,
        dtype=description.dtype,
        attention=weights.attention,
        max_length=max_length,
        codec=config.codec,
        top_k=config.top_k,
        keep_final=config.keep_final,
        batch_tokens=config.batch_tokens,
        shard_tokens=config.shard_tokens,
        limit_rows=config.limit_rows,
        limit_tokens=config.limit_tokens,
    )


def make_plan(identity: Identity, target: TargetDescription, corpus: CorpusRows) -> tuple[Plan, list[CorpusRow]]:
    """Return the plan and the rows in its order. A pure function of its arguments."""
    order, shard_rows = assign_rows([row.num_tokens for row in corpus.rows], identity.shard_tokens)
    rows = [corpus.rows[index] for index in order.tolist()]
    plan = Plan(
        identity=identity,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        row_ids=[row.id for row in rows],
        num_tokens=np.array([row.num_tokens for row in rows], dtype=np.int64),
        num_prompt_tokens=np.array([row.num_prompt_tokens for row in rows], dtype=np.int64),
        prompt_hash=[hash_prompt(row.input_ids[: row.num_prompt_tokens]) for row in rows],
        num_anchors=np.array([row.num_anchors for row in rows], dtype=np.int64),
        shard_rows=shard_rows,
        skipped=corpus.skipped,
    )
    return plan, rows


def plan_parts(
    identity: Identity, target: TargetDescription, parts: Sequence[CorpusRows], out: Path
) -> tuple[Plan, PlacedRows]:
    """Return the plan of a cache with all its extensions, and its rows by their place in it.

    Args:
        identity: the cache's.
        target: its target.
        parts: the rows it was begun with, and those of each extension.
        out: the cache, for messages.
    """
    first = replace(identity, corpus=parts[0].files, appended=())
    plan, rows = make_plan(first, target, parts[0])
    placed = dict(enumerate(rows))
    for corpus in parts[1:]:
        part, rows = make_plan(replace(first, corpus=corpus.files), target, corpus)
        plan = extend_plan(plan, part, out)
        placed |= dict(enumerate(rows, plan.num_rows - len(rows)))
    return replace(plan, identity=identity), placed


def plan_append(out: Path, part: Plan) -> Plan:
    """Return the plan of a finished cache extended by a part; the cache's own where it was last extended by this part.

    Raises:
        CacheMissing, CacheIncomplete, CacheCorrupt: there is no finished cache.
        CacheMismatch: the part does not fit it, see `store.append.extend_plan`.
    """
    manifest = read_manifest(out)
    old = read_plan(out, manifest.generation)
    check_manifest(out, manifest, old)
    if is_appended(old, part):
        check_same_settings(old.identity, part.identity, out)
        return old
    return extend_plan(old, part, out)


def earlier_files(out: Path, sources: Sequence[Source]) -> list[str]:
    """Return the names of the corpus files of a cache that were there before these.

    Raises:
        CacheMissing, CacheIncomplete, CacheCorrupt: there is no finished cache.
    """
    identity = read_manifest(out).identity
    files = list(identity.corpus)
    count = identity.appended[-1] if identity.appended else 0
    if count and [file.sha256 for file in files[-count:]] == [source.file.sha256 for source in sources]:
        files = files[:-count]
    return [file.name for file in files]


def check_place(config: ExtractConfig) -> None:
    """Refuse an output that cannot be written, as far as that is seen without writing, before the corpus is read.

    Raises:
        ConfigError: the URL is not valid.
        BucketError: the bucket is not there, or cannot be reached with these credentials.
        CacheMismatch: the folder is a file, or holds other things than a cache.
        DflashError: the folder may not be written.
    """
    if not is_url(config.out):
        if not config.dry_run:
            check_writable(config.folder)
        refuse_strangers(config.folder)
    elif config.dry_run:
        check_url(str(config.out))
    else:
        check_writable(config.folder, "--work")
        Bucket(str(config.out), create=True).sizes(CLAIMS)  # a look at one object does not tell a missing bucket


def refuse_early(
    config: ExtractConfig,
    description: TargetDescription,
    files: tuple[CorpusFile, ...],
    layer_ids: tuple[int, ...],
    max_length: int | None,
) -> None:
    """Refuse to go on in a cache of other inputs, as far as they can be told apart without the target's weights.

    Raises:
        CacheMismatch: naming the field, both values and what to do.
        CacheMissing, CacheIncomplete, CacheCorrupt: the cache cannot be read, or is not there to be extended.
    """
    if config.append or (config.folder / MANIFEST).exists():
        found = read_manifest(config.folder).identity
    elif (config.folder / PLAN).exists():
        found = read_plan(config.folder).identity
    else:
        return
    weights = Weights(found.target_fingerprint, found.attention)
    ours = make_identity(config, description, weights, files, layer_ids, max_length)
    if config.append:
        check_same_settings(found, ours, config.folder)
    else:
        refuse_difference(config.folder, ours, found)


def is_finished(config: ExtractConfig, sources: Sequence[Source]) -> bool:
    """Return whether a finished cache at the output has these corpus files already, so that nothing need be written."""
    try:
        identity = read_manifest(config.folder).identity
    except DflashError:
        return False
    count = (identity.appended or (0,))[-1] if config.append else len(identity.corpus)
    held = [file.sha256 for file in identity.corpus[len(identity.corpus) - count :]]
    return held == [source.file.sha256 for source in sources]
