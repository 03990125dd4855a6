"""The plan of a cache: which rows, in which shards, in which batches. Written before the first forward.

Batches follow from the plan alone, so an interrupted extraction that goes on computes the same batches, and the
same bits, as one that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from ..errors import CacheMissing, ConfigError
from .durable import write_atomic
from .identity import CorpusFile, Identity, parse_identity
from .jsonfile import digest_json, is_hexadecimal, is_text, read_sealed, seal
from .layout import FORMAT_VERSION, MAX_HIDDEN, MAX_ROW_TOKENS, MAX_VOCAB, IntArray, plan_file, safe_join

__all__ = [
    "CorpusFile",
    "Identity",
    "Plan",
    "assign_rows",
    "count_anchors",
    "hash_prompt",
    "read_plan",
    "write_plan",
]

COLUMNS = ("row_ids", "num_tokens", "num_prompt_tokens", "prompt_hash", "num_anchors")


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Rows in shard order, column by column.

    Attributes:
        identity: what goes in.
        hidden_size, vocab_size: width of a state, and rows of the output head.
        row_ids: R different, non-empty strings.
        num_tokens: [R] int64, at least 1 each.
        num_prompt_tokens: [R] int64, 0..num_tokens.
        prompt_hash: R strings of 16 hexadecimal digits, see `hash_prompt`.
        num_anchors: [R] int64, see `count_anchors`.
        shard_rows: rows of each shard, at least 1 each; they add up to R.
        skipped: corpus rows that did not become rows, by reason.

    Raises:
        ConfigError: the columns do not fit together.
    """

    identity: Identity
    hidden_size: int
    vocab_size: int
    row_ids: list[str]
    num_tokens: IntArray
    num_prompt_tokens: IntArray
    prompt_hash: list[str]
    num_anchors: IntArray
    shard_rows: list[int]
    skipped: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_prompt_tokens", "num_anchors"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.int64))
        self._check_columns()
        self._check_values()

    def _check_columns(self) -> None:
        num_rows = len(self.row_ids)
        if num_rows == 0:
            raise ConfigError("the plan has no rows: nothing of the corpus is usable")
        for name in COLUMNS:
            if len(getattr(self, name)) != num_rows:
                raise ConfigError(f"plan column {name}: expected {num_rows} rows, found {len(getattr(self, name))}")
        if sum(self.shard_rows) != num_rows or min(self.shard_rows) < 1:
            raise ConfigError(f"plan: shard_rows must be positive and add up to {num_rows} rows")
        if len(set(self.row_ids)) != num_rows or "" in set(self.row_ids):
            raise ConfigError("plan: row ids must be different and not empty")
        if not is_text("".join(self.row_ids)):
            raise ConfigError("plan: a row id holds a lone surrogate, which no file can store")

    def _check_values(self) -> None:
        tokens, prompt, anchors = self.num_tokens, self.num_prompt_tokens, self.num_anchors
        if not 1 <= self.hidden_size <= MAX_HIDDEN or not 1 <= self.vocab_size <= MAX_VOCAB:
            raise ConfigError(f"plan: hidden size {self.hidden_size} or vocabulary {self.vocab_size} out of range")
        if tokens.min() < 1 or tokens.max() > MAX_ROW_TOKENS:
            raise ConfigError("plan: every row needs at least one token")
        if prompt.min() < 0 or (prompt > tokens).any():
            raise ConfigError("plan: num_prompt_tokens must lie between 0 and num_tokens")
        if anchors.min() < 0 or (anchors >= tokens).any():
            raise ConfigError("plan: num_anchors must be at least 0 and less than num_tokens")
        if not all(is_hexadecimal(value, 16) for value in self.prompt_hash):
            raise ConfigError("plan: prompt_hash must be 16 hexadecimal digits")

    @property
    def num_rows(self) -> int:
        """Number of rows, R."""
        return len(self.row_ids)

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.shard_rows)

    @cached_property
    def shard_offsets(self) -> IntArray:
        """[shards + 1] int64: first row of each shard, and R."""
        return np.concatenate([[0], np.cumsum(self.shard_rows, dtype=np.int64)])

    def shard_slice(self, shard: int) -> range:
        """Return the row indices of a shard."""
        return range(int(self.shard_offsets[shard]), int(self.shard_offsets[shard + 1]))

    def batches(self, shard: int) -> list[list[int]]:
        """Return a shard's rows in batches of at most `batch_tokens` padded tokens, longest rows first.

        A row longer than the budget is a batch of its own. Equal lengths keep the order of the plan.
        """
        rows = sorted(self.shard_slice(shard), key=lambda row: (-int(self.num_tokens[row]), row))
        batches: list[list[int]] = []
        for row in rows:
            last = batches[-1] if batches else None
            if last and (len(last) + 1) * self.batch_pad_length(last) <= self.identity.batch_tokens:
                last.append(row)
            else:
                batches.append([row])
        return batches

    def batch_pad_length(self, batch: Sequence[int]) -> int:
        """Return the length to which the rows of a batch are padded: its planned shape is [len(batch), that]."""
        return int(max(self.num_tokens[row] for row in batch))

    def fields(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        return {
            "format": FORMAT_VERSION,
            "identity": self.identity.fields(),
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "row_ids": list(self.row_ids),
            "num_tokens": self.num_tokens.tolist(),
            "num_prompt_tokens": self.num_prompt_tokens.tolist(),
            "prompt_hash": list(self.prompt_hash),
            "num_anchors": self.num_anchors.tolist(),
            "shard_rows": list(self.shard_rows),
            "skipped": dict(self.skipped),
        }

    @cached_property
    def digest(self) -> str:
        """The xxh3-128 of the rows, shards and identity digest. Two plans with equal digests give equal caches."""
        values = {key: value for key, value in self.fields().items() if key != "skipped"}
        return digest_json({**values, "identity": self.identity.digest})


def assign_rows(num_tokens: ArrayLike, shard_tokens: int) -> tuple[IntArray, list[int]]:
    """Order rows and cut them into shards, so that every shard is a fair sample of the corpus.

    The order is a fixed pseudo-random permutation: the stable sort of the raw output of PCG64 with seed 0, which
    numpy promises never to change (it makes no such promise for `Generator.permutation`). Shards are filled
    greedily up to `shard_tokens`; rows never straddle, and a longer row gets a shard of its own.

    Returns:
        (order, shard_rows): [R] int64, the corpus row at each place; and the rows of each shard.
    """
    lengths = np.asarray(num_tokens, dtype=np.int64)
    order = np.argsort(np.random.PCG64(0).random_raw(len(lengths)), kind="stable").astype(np.int64)
    shard_rows: list[int] = []
    filled = 0
    for length in lengths[order].tolist():
        if shard_rows and filled + length <= shard_tokens:
            shard_rows[-1] += 1
            filled += length
        else:
            shard_rows.append(1)
            filled = length
    return order, shard_rows


def hash_prompt(prompt_ids: ArrayLike) -> str:
    """Return the xxh3-64 of prompt token ids as little-endian int32, in 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(prompt_ids, dtype="<i4").tobytes())


def count_anchors(loss_mask: NDArray[np.bool_] | Sequence[bool]) -> int:
    """Count the eligible anchors of a row: positions a with loss_mask[a] and loss_mask[a + 1]."""
    mask = np.asarray(loss_mask, dtype=np.bool_)
    return int(np.count_nonzero(mask[:-1] & mask[1:]))


def write_plan(cache: Path, plan: Plan) -> None:
    """Write the plan into its file of a cache, atomically."""
    write_atomic(cache / plan_file(plan.identity.generation), seal(plan.fields()))


def read_plan(cache: Path, generation: int = 0) -> Plan:
    """Read and check CACHE/plan.json, or the plan of a cache that was extended so many times.

    Raises:
        CacheMissing: there is none.
        CacheCorrupt: it is damaged, or its values do not fit together.
    """
    path = safe_join(cache, plan_file(generation))
    if not path.exists():
        raise CacheMissing(
            f"{cache}: no cache here (there is no {path.name}); `dflash extract --out {cache}` makes one"
        )
    source = read_sealed(path)
    check_format(source.get("format"), path)
    source.only(*Plan.__dataclass_fields__, "format", "digest")
    identity = parse_identity(source.child("identity"))
    if identity.generation != generation:
        source.fail("identity", f"the identity of a cache extended {generation} times", identity.appended)
    try:
        return Plan(
            identity=identity,
            hidden_size=source.integer("hidden_size", 1, MAX_HIDDEN),
            vocab_size=source.integer("vocab_size", 1, MAX_VOCAB),
            row_ids=source.texts("row_ids"),
            num_tokens=np.asarray(source.integers("num_tokens", 1, MAX_ROW_TOKENS), dtype=np.int64),
            num_prompt_tokens=np.asarray(source.integers("num_prompt_tokens"), dtype=np.int64),
            prompt_hash=source.texts("prompt_hash"),
            num_anchors=np.asarray(source.integers("num_anchors"), dtype=np.int64),
            shard_rows=source.integers("shard_rows", 1),
            skipped=source.counts("skipped"),
        )
    except ConfigError as error:
        source.fail("", f"columns that fit together ({error})", None)


def check_format(found: object, path: Path) -> None:
    """Refuse a file of another version of the format.

    Raises:
        ConfigError: the version is not ours, but may be valid.
    """
    if found != FORMAT_VERSION or type(found) is not int:
        raise ConfigError(
            f"{path}: cache format {str(found)[:20]}, this dflash reads format {FORMAT_VERSION}: "
            "use the version of dflash-pipeline that wrote it, or extract again"
        )
