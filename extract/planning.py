"""From corpus rows to the plan of a cache: identity, order, shards."""

from __future__ import annotations

import numpy as np

from ..store.plan import Identity, Plan, assign_rows, hash_prompt
from ..target import Target
from .config import ExtractConfig
from .corpus import CorpusRows
from .rows import CorpusRow


def make_identity(
    config: ExtractConfig, target: Target, corpus: CorpusRows, layer_ids: tuple[int, ...], max_length: int | None
) -> Identity:
    """Return everything that goes into the cache. `max_length` is the limit that was applied to the rows."""
    return Identity(
        target_name=target.name,
        target_revision=target.revision,
        target_fingerprint=target.fingerprint,
        tokenizer_hash=target.tokenizer_hash,
        template_hash=target.template_hash,
        corpus=corpus.files,
        layer_ids=layer_ids,
        dtype=target.description.dtype,
        attention=str(getattr(target.config, "_attn_implementation", None) or config.attention),
        max_length=max_length,
        codec=config.codec,
        top_k=config.top_k,
        keep_final=config.keep_final,
        batch_tokens=config.batch_tokens,
        shard_tokens=config.shard_tokens,
        limit_rows=config.limit_rows,
        limit_tokens=config.limit_tokens,
    )


def make_plan(identity: Identity, target: Target, corpus: CorpusRows) -> tuple[Plan, list[CorpusRow]]:
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
