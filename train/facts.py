"""What a run takes from a cache before it reads any shard."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..drafter.device import choose_device
from ..errors import CacheCorrupt, ConfigError, DflashError
from ..store import CacheReader, open_cache
from ..store.splits import split_rows
from .config import CacheFacts, ResolvedConfig, resolve
from .mask_token import read_tokenizer_facts
from .precision import choose_precision
from .recipe import Recipe
from .run_folder import RunFolder
from .sampling import RowTable


def printed_config(recipe: Recipe, cache: Path | str | None, device: str) -> dict[str, Any]:
    """Return what --print-config shows: the recipe, or all that a run would save where a cache is given."""
    if cache is None:
        return dataclasses.asdict(recipe)
    return resolve_for(recipe, open_cache(cache), None, choose_device(device)).as_dict()


def resolve_for(
    recipe: Recipe, cache: CacheReader, folder: RunFolder | None, device: torch.device, num_ranks: int = 1
) -> ResolvedConfig:
    """Resolve a recipe against a cache; a resumed run keeps what its first start chose for itself.

    A step of a new run has one pack for each of `num_ranks` processes, where the recipe does not say.

    Raises:
        ConfigError: a setting is not valid for this cache.
        CacheCorrupt: the target's config or tokenizer in the cache are not what such files hold.
    """
    saved = folder.saved_config() if folder else None
    chosen = saved.get("precision") if saved and recipe.precision == "auto" else None
    packs = (saved or {}).get("packs_per_step") or num_ranks
    try:
        facts = cache_facts(cache, recipe.heldout_share)
        return resolve(recipe, facts, chosen or choose_precision(recipe.precision, device), packs)
    except DflashError:
        raise
    except (ValueError, TypeError, AttributeError, KeyError, ArithmeticError, RecursionError) as error:
        # these files come with the cache, from strangers: any type may stand anywhere
        raise CacheCorrupt(f"{cache.target_dir}: not the config and tokenizer of a target ({error!r})") from error


def cache_facts(cache: CacheReader, heldout_share: float) -> CacheFacts:
    """Return what resolving needs, from the manifest, the plan and the target's small files."""
    rows = training_rows(cache, heldout_share)
    return CacheFacts(
        identity=cache.identity,
        fingerprint=cache.fingerprint,
        layer_ids=tuple(cache.layer_ids),
        hidden_size=cache.hidden_size,
        vocab_size=cache.vocab_size,
        has_final=cache.manifest.identity.keep_final,
        dtype=str(cache.dtype).removeprefix("torch."),
        num_train_tokens=int(rows.num_tokens.sum()),
        num_train_shards=len(np.unique(rows.shard)),
        longest_reply_tokens=int(rows.num_anchors.max()) + 1,
        target_config=cache.target_config(),
        tokenizer=read_tokenizer_facts(cache.target_dir),
    )


def training_rows(cache: CacheReader, heldout_share: float) -> RowTable:
    """Return the rows that are not held out and have an anchor.

    Raises:
        ConfigError: there are none.
    """
    index = split_rows(cache.prompt_hash, heldout_share, "train")
    index = index[cache.num_anchors[index] > 0]
    if not len(index):
        raise ConfigError(f"{cache.place}: no rows to train on with heldout_share = {heldout_share}")
    return RowTable(
        index=index,
        num_tokens=cache.num_tokens[index],
        num_anchors=cache.num_anchors[index],
        shard=cache.row_shard[index],
    )


def whole_block_share(rows: RowTable, block_size: int) -> float:
    """Return the share of the rows' anchors, 0 to 1, whose row's reply goes on to the end of their block.

    The anchors are a reply's tokens but its last, so a reply of n anchors has n - B + 2 such. Several replies of a row
    count as one, which makes this an upper bound there.
    """
    whole = np.maximum(rows.num_anchors - block_size + 2, 0)
    return float(whole.sum() / rows.num_anchors.sum())
