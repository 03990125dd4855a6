"""The manifest: identity, shard table and totals. Written last, on completion only; it seals the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CacheCorrupt, CacheIncomplete, CacheMissing
from .durable import write_atomic
from .identity import Identity, parse_identity
from .jsonfile import DIGEST_HEX, Fields, is_hexadecimal, read_sealed, seal
from .layout import (
    FORMAT_VERSION,
    ITEM_BYTES,
    MANIFEST,
    MAX_HIDDEN,
    MAX_VOCAB,
    plan_file,
    safe_join,
    shard_dir,
    stats_file,
)
from .plan import Plan, check_format, read_plan
from .record import (
    FileRecord,
    LayerStats,
    ShardRecord,
    file_fields,
    fingerprint,
    merge_stats,
    parse_files,
    parse_layers,
    parse_record,
)

FIELDS = (
    "format", "digest", "identity", "identity_digest", "fingerprint", "hidden_size", "vocab_size", "rows", "tokens",
    "state_bytes", "raw_state_bytes", "skipped", "dropped", "layers", "files", "shards", "versions", "parents",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of manifest.json.

    Attributes:
        identity, identity_digest: what went in.
        fingerprint: what came out: the hash of the identity and of every shard's file digests.
        hidden_size, vocab_size: width of a state, rows of the output head.
        num_rows, num_tokens: stored, dropped rows apart.
        state_bytes, raw_state_bytes: the captured layers' states as stored, and as they would be uncompressed.
        skipped, dropped: rows that never became rows, and rows of the plan that were not stored, by reason.
        layers: statistics per layer over all shards.
        files: records of the files outside the shards.
        shards: the records of all shards, in order.
        versions: packages that wrote it. In no hash.
        parents: fingerprints this cache had before it was repaired with other last bits, oldest first. In no hash.
    """

    identity: Identity
    identity_digest: str
    fingerprint: str
    hidden_size: int
    vocab_size: int
    num_rows: int
    num_tokens: int
    state_bytes: int
    raw_state_bytes: int
    skipped: dict[str, int]
    dropped: dict[str, int]
    layers: dict[int, LayerStats]
    files: dict[str, FileRecord]
    shards: tuple[ShardRecord, ...]
    versions: dict[str, str]
    parents: tuple[str, ...] = ()

    @property
    def generation(self) -> int:
        """How many times the cache was extended; its plan and statistics are named by it."""
        return self.identity.generation

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.shards)

    @property
    def num_bytes(self) -> int:
        """Bytes of all recorded files."""
        return sum(file.num_bytes for file in self.files.values()) + sum(record.num_bytes for record in self.shards)

    def fields(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        return {
            "format": FORMAT_VERSION,
            "identity": self.identity.fields(),
            "identity_digest": self.identity_digest,
            "fingerprint": self.fingerprint,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "rows": self.num_rows,
            "tokens": self.num_tokens,
            "state_bytes": self.state_bytes,
            "raw_state_bytes": self.raw_state_bytes,
            "skipped": dict(self.skipped),
            "dropped": dict(self.dropped),
            "layers": {str(layer): vars(stats) for layer, stats in self.layers.items()},
            "files": file_fields(self.files),
            "shards": [record.fields() for record in self.shards],
            "versions": dict(self.versions),
            **({"parents": list(self.parents)} if self.parents else {}),
        }


def build_manifest(
    plan: Plan,
    shards: tuple[ShardRecord, ...],
    files: dict[str, FileRecord],
    versions: Mapping[str, str],
    parents: tuple[str, ...] = (),
) -> Manifest:
    """Derive the manifest from the plan and the records of all its shards."""
    identity = plan.identity
    num_tokens = sum(record.num_tokens for record in shards)
    dropped: Counter[str] = Counter()
    for record in shards:
        dropped.update({reason: len(ids) for reason, ids in record.dropped.items()})
    return Manifest(
        identity=identity,
        identity_digest=identity.digest,
        fingerprint=fingerprint(identity.digest, shards),
        hidden_size=plan.hidden_size,
        vocab_size=plan.vocab_size,
        num_rows=sum(record.num_rows for record in shards),
        num_tokens=num_tokens,
        state_bytes=sum(record.state_bytes for record in shards),
        raw_state_bytes=num_tokens * plan.hidden_size * len(identity.layer_ids) * ITEM_BYTES[identity.dtype],
        skipped=dict(plan.skipped),
        dropped=dict(dropped),
        layers={layer: merge_stats([record.layers[layer] for record in shards]) for layer in identity.layer_ids},
        files=files,
        shards=shards,
        versions=dict(versions),
        parents=parents,
    )


def write_manifest(cache: Path, manifest: Manifest) -> None:
    """Write CACHE/manifest.json atomically."""
    write_atomic(cache / MANIFEST, seal(manifest.fields()))


def read_manifest(cache: Path) -> Manifest:
    """Read and check CACHE/manifest.json: its own digest, every type and bound, every path, and that it agrees with
    itself.

    Raises:
        CacheMissing: there is no cache.
        CacheIncomplete: there is a plan, but its extraction has not finished.
        CacheCorrupt: the manifest is damaged or does not agree with itself.
        ConfigError: it is of another version of the format.
    """
    path = safe_join(cache, MANIFEST)
    if not path.exists():
        raise _incomplete(cache)
    try:
        source = read_sealed(path)
    except CacheCorrupt as error:
        raise CacheCorrupt(f"{error}; delete it and run the same `dflash extract` again: shards stay") from error
    check_format(source.get("format"), path)
    source.only(*FIELDS)
    identity = parse_identity(source.child("identity"))
    versions = source.child("versions")
    return Manifest(
        identity=identity,
        identity_digest=source.hexadecimal("identity_digest"),
        fingerprint=source.hexadecimal("fingerprint"),
        hidden_size=source.integer("hidden_size", 1, MAX_HIDDEN),
        vocab_size=source.integer("vocab_size", 1, MAX_VOCAB),
        num_rows=source.integer("rows"),
        num_tokens=source.integer("tokens"),
        state_bytes=source.integer("state_bytes"),
        raw_state_bytes=source.integer("raw_state_bytes"),
        skipped=source.counts("skipped"),
        dropped=source.counts("dropped"),
        layers=parse_layers(source.child("layers"), identity.layer_ids),
        files=parse_files(source.child("files")),
        shards=tuple(parse_record(entry, identity.layer_ids) for entry in source.objects("shards")),
        versions={name: versions.text(name) for name in versions.values},
        parents=_parse_parents(source),
    )


def _parse_parents(source: Fields) -> tuple[str, ...]:
    if "parents" not in source.values:
        return ()
    parents = source.texts("parents")
    if not parents or not all(is_hexadecimal(value, DIGEST_HEX) for value in parents):
        source.fail("parents", "fingerprints, at least one", parents)
    return tuple(parents)


def check_manifest(cache: Path, manifest: Manifest, plan: Plan) -> None:
    """Check that a manifest is the one that follows from its plan and its own shard table.

    Raises:
        CacheCorrupt: it is not, naming the field.
    """
    path = cache / MANIFEST
    for index, record in enumerate(manifest.shards):
        if record.shard != index:
            raise CacheCorrupt(f"{path}: shards[{index}]: expected shard {index}, found {record.shard}")
    if manifest.num_shards != plan.num_shards:
        raise CacheCorrupt(f"{path}: {manifest.num_shards} shards, its plan says {plan.num_shards}")
    plan_name = plan_file(manifest.generation)
    for name in (plan_name, stats_file(manifest.generation)):
        if name not in manifest.files:
            raise CacheCorrupt(f"{path}: files: expected a record of {name}, found none")
    _check_shards(path, manifest, plan)
    expected = build_manifest(plan, manifest.shards, manifest.files, manifest.versions, manifest.parents).fields()
    for key, value in manifest.fields().items():
        if value != expected[key]:
            raise CacheCorrupt(
                f"{path}: {key}: {str(value)[:60]} does not follow from {plan_name} and the shard table "
                f"(expected {str(expected[key])[:60]}); the cache is damaged, extract it again"
            )


def _check_shards(path: Path, manifest: Manifest, plan: Plan) -> None:
    """Check that the rows, tokens and values of every shard are those that the plan and the dropped rows leave."""
    for record in manifest.shards:
        planned = {plan.row_ids[row]: int(plan.num_tokens[row]) for row in plan.shard_slice(record.shard)}
        dropped = [name for ids in record.dropped.values() for name in ids]
        if len(set(dropped)) != len(dropped) or not planned.keys() >= set(dropped):
            raise CacheCorrupt(
                f"{path}: shard {record.shard}: drops a row twice, or one that the plan does not put there"
            )
        rows = len(planned) - len(dropped)
        tokens = sum(planned.values()) - sum(planned[name] for name in dropped)
        if (record.num_rows, record.num_tokens) != (rows, tokens):
            raise CacheCorrupt(
                f"{path}: shard {record.shard}: {record.num_rows} rows and {record.num_tokens} tokens, its plan and "
                f"the dropped rows say {rows} and {tokens}"
            )
        for layer, stats in record.layers.items():
            if stats.values != tokens * plan.hidden_size:
                raise CacheCorrupt(
                    f"{path}: shard {record.shard}: statistics of layer {layer} over {stats.values} values, expected "
                    f"{tokens * plan.hidden_size}"
                )


def count_committed(cache: Path, plan: Plan) -> int:
    """Count the shards of a plan that are in their final place."""
    return sum(shard_dir(cache, shard).is_dir() for shard in range(plan.num_shards))


def _incomplete(cache: Path) -> CacheMissing:
    if cache.exists() and not cache.is_dir():
        return CacheMissing(f"{cache}: this is a file, and a cache is a folder: give the folder that holds {MANIFEST}")
    if not cache.is_dir():
        return CacheMissing(f"{cache}: no cache here (no such folder); `dflash extract --out {cache}` makes one")
    try:
        plan = read_plan(cache)
    except (CacheMissing, CacheCorrupt) as error:
        return CacheMissing(str(error))
    return CacheIncomplete(
        f"{cache}: the extraction has not finished: {count_committed(cache, plan)} of {plan.num_shards} shards are "
        "there; run the same `dflash extract` again and it goes on from them"
    )
