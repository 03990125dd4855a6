"""The identity of a cache: everything that went in, and the one digest that stands for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..errors import ConfigError, counted
from .jsonfile import Fields, digest_json, is_hexadecimal
from .layout import DTYPES, FORMAT_VERSION, MAX_LAYERS, MAX_ROW_TOKENS, MAX_TOP_K

INFORMATIVE = ("target_name", "target_revision")  # a moved or renamed target stays itself: its fingerprint decides
SHOWN_FILES = 3


@dataclass(frozen=True, kw_only=True)
class CorpusFile:
    """One corpus file: its name is informative, its content is what counts."""

    name: str
    sha256: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Everything that decides the content of a cache.

    The digest leaves out names (of the target and of the corpus files) and versions of packages, so that moving
    things about or upgrading does not make another cache of the same one.

    `appended` lists, for each time the cache was extended, how many of the last files of `corpus` came with it. Length
    and limits hold for each part by itself.

    Raises:
        ConfigError: a value has the wrong type or range.
    """

    target_name: str
    target_revision: str | None
    target_fingerprint: str
    tokenizer_hash: str
    template_hash: str
    corpus: tuple[CorpusFile, ...]
    layer_ids: tuple[int, ...]
    dtype: str
    attention: str
    max_length: int | None
    codec: str
    top_k: int
    keep_final: bool
    batch_tokens: int
    shard_tokens: int
    limit_rows: int | None
    limit_tokens: int | None
    appended: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r}: expected one of {', '.join(DTYPES)}")
        if not self.layer_ids or len(set(self.layer_ids)) != len(self.layer_ids):
            raise ConfigError(f"layer ids {list(self.layer_ids)}: expected at least one, each once")
        if not all(type(layer) is int and 0 <= layer < MAX_LAYERS for layer in self.layer_ids):
            raise ConfigError(f"layer ids {list(self.layer_ids)}: expected whole numbers from 0 to {MAX_LAYERS - 1}")
        if not 1 <= self.top_k <= MAX_TOP_K:
            raise ConfigError(f"top_k {self.top_k}: expected 1 to {MAX_TOP_K}")
        if not self.corpus:
            raise ConfigError("the identity names no corpus file: expected at least one")
        for file in self.corpus:
            if not is_hexadecimal(file.sha256, 64):
                raise ConfigError(f"corpus file {file.name}: sha256 {file.sha256!r} is not 64 hexadecimal digits")
        if not all(type(count) is int and count >= 1 for count in self.appended):
            raise ConfigError(f"appended {list(self.appended)}: expected whole numbers from 1")
        if sum(self.appended) >= len(self.corpus):
            raise ConfigError(f"appended {list(self.appended)}: more files than the {len(self.corpus)} of the corpus")
        for name in ("max_length", "batch_tokens", "shard_tokens", "limit_rows", "limit_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} {value}: expected at least 1")

    @property
    def generation(self) -> int:
        """How many times the cache was extended."""
        return len(self.appended)

    @property
    def part_files(self) -> tuple[int, ...]:
        """How many files of `corpus` the cache was begun with, and how many came each time it was extended."""
        return (len(self.corpus) - sum(self.appended), *self.appended)

    def fields(self) -> dict[str, Any]:
        """Return everything as plain JSON values, names included."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["corpus"] = [
            {"name": file.name, "sha256": file.sha256, "num_bytes": file.num_bytes} for file in self.corpus
        ]
        values["layer_ids"] = list(self.layer_ids)
        values["appended"] = list(self.appended)
        if not self.appended:
            del values["appended"]
        return values

    def hashed_fields(self) -> dict[str, Any]:
        """Return what the digest covers: the fields without names, and the format's version."""
        values = {key: value for key, value in self.fields().items() if key not in INFORMATIVE}
        values["corpus"] = [{"sha256": file.sha256, "num_bytes": file.num_bytes} for file in self.corpus]
        return {"format": FORMAT_VERSION, **values}

    @property
    def digest(self) -> str:
        """The xxh3-128 of the canonical JSON of `hashed_fields`, in hexadecimal."""
        return digest_json(self.hashed_fields())

    def differences(self, other: Identity) -> list[tuple[str, Any, Any]]:
        """Return (field, ours, theirs) for each hashed field in which two identities differ; of the corpus in words."""
        ours, theirs = self.hashed_fields(), other.hashed_fields()
        keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        corpus = _differing_files(self.corpus, other.corpus)
        return [(key, *(corpus if key == "corpus" else (ours.get(key), theirs.get(key)))) for key in keys]


def _differing_files(ours: Sequence[CorpusFile], theirs: Sequence[CorpusFile]) -> tuple[str, str]:
    """Return in words which files either corpus holds, from the first one on that is not the other's."""
    pairs = zip(ours, theirs, strict=False)
    alike = next(
        (number for number, (a, b) in enumerate(pairs) if (a.sha256, a.num_bytes) != (b.sha256, b.num_bytes)),
        min(len(ours), len(theirs)),
    )

    def words(files: Sequence[CorpusFile]) -> str:
        shown = [f"{file.name} ({file.num_bytes:,} bytes, sha256 {file.sha256[:12]})" for file in files[alike:]]
        more = [f"{len(shown) - SHOWN_FILES} more"] if len(shown) > SHOWN_FILES else []
        listed = " and ".join([", ".join(shown[:SHOWN_FILES]), *more]) or "no more"
        return f"{counted(alike, 'file')} alike, then {listed}" if alike else listed

    return words(ours), words(theirs)


def parse_identity(source: Fields) -> Identity:
    """Read an identity from untrusted JSON.

    Raises:
        CacheCorrupt: a field is missing, unknown, or of the wrong type or range.
    """
    source.only(*(field.name for field in fields(Identity)))
    corpus = []
    for file in source.objects("corpus"):
        file.only("name", "sha256", "num_bytes")
        corpus.append(
            CorpusFile(
                name=file.text("name"), sha256=file.hexadecimal("sha256", 64), num_bytes=file.integer("num_bytes")
            )
        )
    revision = source.get("target_revision")
    values: dict[str, Any] = {
        "target_revision": None if revision is None else source.text("target_revision"),
        "corpus": tuple(corpus),
        "layer_ids": tuple(source.integers("layer_ids", 0, MAX_LAYERS - 1)),
        "top_k": source.integer("top_k", 1, MAX_TOP_K),
        "keep_final": source.boolean("keep_final"),
    }
    for name in ("target_name", "target_fingerprint", "tokenizer_hash", "template_hash", "dtype", "attention", "codec"):
        values[name] = source.text(name)
    if "appended" in source.values:
        values["appended"] = tuple(source.integers("appended", 1))
        if not values["appended"]:
            source.fail("appended", "at least one number, or no such field", [])
    for name in ("batch_tokens", "shard_tokens"):
        values[name] = source.integer(name, 1)
    values["max_length"] = source.optional_integer("max_length", 1, MAX_ROW_TOKENS)
    for name in ("limit_rows", "limit_tokens"):
        values[name] = source.optional_integer(name, 1)
    try:
        return Identity(**values)
    except ConfigError as error:
        source.fail("", f"a valid identity ({error})", None)
