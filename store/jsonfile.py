"""Strict JSON: canonical bytes, self-digests, and typed access to untrusted fields."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NoReturn

import xxhash

from ..errors import CacheCorrupt, CacheMissing
from .layout import MAX_JSON_BYTES, file_size

DIGEST_HEX = 32
MAX_NUMBER = 2.0**128
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_HEXADECIMAL = re.compile("[0-9a-f]*")


def canonical_bytes(value: object) -> bytes:
    """Return the canonical JSON of a value: sorted keys, no spaces, UTF-8, no NaN. Equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_bytes(data: bytes) -> str:
    """Return the xxh3-128 of bytes in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_json(value: object) -> str:
    """Return the xxh3-128 of a value's canonical JSON."""
    return digest_bytes(canonical_bytes(value))


def seal(fields: dict[str, Any]) -> bytes:
    """Return the bytes of a JSON file that carries the digest of everything else in it as `digest`."""
    return canonical_bytes({**fields, "digest": digest_json(fields)}) + b"\n"


def read_bytes(path: Path) -> bytes:
    """Read a small file whole.

    Raises:
        CacheMissing: there is no such file, or it may not be read.
        CacheCorrupt: it is larger than any JSON file of the format may be.
    """
    size = file_size(path)
    if size is None:  # also a pipe or a device, which would never end
        raise CacheMissing(f"{path}: missing, or no regular file; the cache needs this file")
    if size > MAX_JSON_BYTES:
        raise CacheCorrupt(f"{path}: larger than {MAX_JSON_BYTES} bytes, the most a JSON file of a cache may have")
    try:
        return path.read_bytes()
    except OSError as error:
        raise CacheMissing(f"{path}: cannot be read ({error.strerror or error}); the cache needs this file") from error


def parse_json(data: bytes, path: Path | str) -> Fields:
    """Parse one JSON object of the cache.

    Raises:
        CacheCorrupt: it is not UTF-8, not JSON, has NaN or repeated keys, or is not an object.
    """

    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"the number {name}")

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        if len(keys) != len(pairs):
            raise ValueError("a repeated key")
        return keys

    try:
        value = json.loads(data.decode("utf-8"), parse_constant=refuse_constant, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CacheCorrupt(f"{path}: not the JSON this file must be ({error}); it is damaged or cut short") from error
    return Fields(value, path, "")


def read_sealed(path: Path) -> Fields:
    """Read a JSON file written by `seal`; check its digest, and that its bytes are the canonical ones.

    The digest covers values. That alone would pass a file whose last newline is gone, or whose 1e-05 became 1E-05.

    Raises:
        CacheMissing: no such file.
        CacheCorrupt: not JSON, or changed since it was written.
    """
    return parse_sealed(read_bytes(path), path)


def parse_sealed(data: bytes, path: Path | str) -> Fields:
    """Check the bytes of a JSON file written by `seal`, wherever they came from; `path` is for messages."""
    fields = parse_json(data, path)
    stored = fields.text("digest")
    try:
        found = digest_json({key: value for key, value in fields.values.items() if key != "digest"})
    except (ValueError, RecursionError) as error:  # a lone surrogate, a number that overflows
        raise CacheCorrupt(f"{path}: holds a value that no cache writes ({error}); it is damaged") from error
    if stored != found:
        raise CacheCorrupt(f"{path}: its digest says {stored}, its content {found}: changed since it was written")
    if canonical_bytes(fields.values) + b"\n" != data:
        raise CacheCorrupt(f"{path}: not in canonical form: changed since it was written")
    return fields


class Fields:
    """One JSON object of untrusted origin, read field by field with its type and bounds."""

    def __init__(self, value: object, path: Path | str, where: str) -> None:
        self.path = path
        self.where = where
        if not isinstance(value, dict):
            self.fail("", "an object", value)
        self.values: dict[str, Any] = value

    def fail(self, key: str, expected: str, found: object) -> NoReturn:
        """Raise CacheCorrupt, naming file, field, expected and found."""
        name = f"{self.where}.{key}" if self.where and key else self.where or key or "the file"
        shown = repr(found)
        raise CacheCorrupt(f"{self.path}: {name}: expected {expected}, found {shown[:80]}")

    def only(self, *keys: str) -> None:
        """Refuse any field besides these."""
        unknown = sorted(set(self.values) - set(keys))
        if unknown:
            self.fail(unknown[0], "no such field in format 1", self.values[unknown[0]])

    def get(self, key: str) -> Any:
        """Return a field of any type; it must be there."""
        if key not in self.values:
            self.fail(key, "a value", None)
        return self.values[key]

    def integer(self, key: str, low: int = 0, high: int = 2**62) -> int:
        """Return an integer within low..high."""
        value = self.get(key)
        if type(value) is not int or not low <= value <= high:
            self.fail(key, f"an integer from {low} to {high}", value)
        return int(value)

    def number(self, key: str) -> float:
        """Return a finite number that float32 could hold: its square and sums of squares stay finite in float64."""
        value = self.get(key)
        if type(value) not in (int, float) or not abs(value) <= MAX_NUMBER:
            self.fail(key, f"a number of at most {MAX_NUMBER:g}", value)
        return float(value)

    def boolean(self, key: str) -> bool:
        """Return true or false."""
        value = self.get(key)
        if type(value) is not bool:
            self.fail(key, "true or false", value)
        return bool(value)

    def text(self, key: str) -> str:
        """Return a string that UTF-8 can hold."""
        return self._text(key, self.get(key))

    def _text(self, key: str, value: object) -> str:
        if type(value) is not str:
            self.fail(key, "a string", value)
        if not is_text(value):
            self.fail(key, "text without lone surrogates", value)
        return value

    def hexadecimal(self, key: str, digits: int = DIGEST_HEX) -> str:
        """Return a lower-case hexadecimal string of a fixed length."""
        value = self.text(key)
        if not is_hexadecimal(value, digits):
            self.fail(key, f"{digits} hexadecimal digits", value)
        return value

    def optional_integer(self, key: str, low: int = 0, high: int = 2**62) -> int | None:
        """Return an integer or None."""
        return None if self.get(key) is None else self.integer(key, low, high)

    def integers(self, key: str, low: int = 0, high: int = 2**62) -> list[int]:
        """Return a list of integers within low..high."""
        values = self.get(key)
        if type(values) is not list:
            self.fail(key, "a list of integers", values)
        for value in values:
            if type(value) is not int or not low <= value <= high:
                self.fail(key, f"integers from {low} to {high}", value)
        return values

    def texts(self, key: str) -> list[str]:
        """Return a list of strings."""
        values = self.get(key)
        if type(values) is not list:
            self.fail(key, "a list of strings", values)
        return [self._text(key, value) for value in values]

    def objects(self, key: str) -> list[Fields]:
        """Return a list of objects."""
        values = self.get(key)
        if type(values) is not list:
            self.fail(key, "a list of objects", values)
        return [Fields(value, self.path, f"{key}[{index}]") for index, value in enumerate(values)]

    def child(self, key: str) -> Fields:
        """Return an object held by a field."""
        return Fields(self.get(key), self.path, f"{self.where}.{key}" if self.where else key)

    def counts(self, key: str) -> dict[str, int]:
        """Return an object of names and counts."""
        child = self.child(key)
        return {name: child.integer(name) for name in child.values}


def is_text(value: str) -> bool:
    """Tell whether UTF-8 can hold a string (JSON can spell lone surrogates, which it cannot)."""
    return value.isascii() or _LONE_SURROGATE.search(value) is None


def is_hexadecimal(value: str, digits: int) -> bool:
    """Tell whether a string is exactly so many lower-case hexadecimal digits."""
    return len(value) == digits and _HEXADECIMAL.fullmatch(value) is not None
