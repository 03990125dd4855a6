"""Object storage: the files of a cache under a URL, s3://bucket/prefix, gs://bucket/prefix or file:///folder.

obstore moves the bytes (docs/log.md has its cost beside fsspec); it comes with the extra `buckets`. Credentials,
region and endpoint are those its variables name, the same that the provider's own tools read: AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS, ... An object appears whole or not at all: that is each put's promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

from ..errors import CacheCorrupt, CacheMissing, ConfigError, DflashError, message_line
from .durable import temporary_name
from .layout import MAX_JSON_BYTES

SCHEMES = ("s3", "gs", "file")
STREAM_BYTES = 2**22
REQUESTS = 8
"""Requests to a bucket at once."""

T = TypeVar("T")
Token = dict[str, str]  # what a store calls the state of an object: e_tag, version


def is_url(place: object) -> bool:
    """Tell whether a cache's place is a URL and not a folder."""
    return isinstance(place, str) and "://" in place


class Bucket:
    """The objects under one URL, by their path below it.

    Args:
        url: where they are.
        create: make the folder of a file:// URL; a bucket is never made.

    Raises:
        ConfigError: the scheme is not one of SCHEMES, the extra is not installed, or a variable of the provider is not
            valid.
        CacheMissing: there is no folder of a file:// URL.
    """

    def __init__(self, url: str, *, create: bool = False) -> None:
        self.url = url.rstrip("/")
        if self.url.partition("://")[0] not in SCHEMES:
            raise ConfigError(f"{url}: expected a folder, or a URL that begins with {', '.join(SCHEMES)} and ://")
        try:
            import obstore  # noqa: PLC0415 - an extra
            from obstore.store import from_url  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(f"{url}: buckets need an extra: pip install 'dflash-pipeline[buckets]'") from error
        self._obstore: Any = obstore
        local = self.url.startswith("file:")
        if local and not create and not Path(url2pathname(urlsplit(self.url).path)).is_dir():
            raise CacheMissing(f"{url}: there is no such folder")
        try:
            options: Any = {"mkdir": create} if local else {}
            self._store: Any = from_url(self.url, **options)
        except (obstore.exceptions.BaseError, ValueError) as error:
            raise ConfigError(f"{url}: {message_line(error)}") from error

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes, or None where there is none.

        Raises:
            CacheMissing: the bucket cannot be reached.
        """
        found = self._if_there(name, lambda: self._obstore.head(self._store, name))
        return None if found is None else int(found["size"])

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return path and size of every object below a prefix."""
        with self._explained(prefix):
            batches = self._obstore.list(self._store, prefix=prefix)
            return {entry["path"]: int(entry["size"]) for batch in batches for entry in batch}

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return a small object whole.

        Raises:
            CacheMissing: there is none, or it cannot be reached.
            CacheCorrupt: it is larger than that.
        """
        with self._explained(name):
            return self._get(name, most_bytes)[0]

    def download(self, name: str, path: Path, num_bytes: int) -> None:
        """Stream an object into a file; the file is there whole or not at all.

        Raises:
            CacheMissing: there is no such object, or it cannot be reached.
            CacheCorrupt: it has another size.
        """
        with self._explained(name):
            found = self._obstore.get(self._store, name)
            size = int(found.meta["size"])
            if size != num_bytes:
                raise CacheCorrupt(f"{self.url}/{name}: expected {num_bytes} bytes, found {size}")
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(temporary_name(path.name))
            try:
                with temporary.open("wb") as file:
                    for block in found.stream(min_chunk_size=STREAM_BYTES):
                        file.write(block)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)

    def upload(self, name: str, content: Path | bytes) -> None:
        """Put an object, whole or not at all.

        Raises:
            DflashError: it cannot be written.
        """
        try:
            self._obstore.put(self._store, name, content)
        except (self._obstore.exceptions.BaseError, OSError) as error:
            raise DflashError(f"{self.url}/{name}: cannot be written: {message_line(error)}") from error

    def put_if(self, name: str, data: bytes, token: Token | None) -> Token | None:
        """Put a small object where it still is as it was: conditionally, so that of several writers one succeeds.

        Args:
            name, data: the object.
            token: the state that must be there, as returned by this or by `look`; None: there must be no such object.

        Returns:
            The token of what was put; None where another state is there, or one that an earlier try of this very put
            made whose answer was lost: `look` tells.

        Raises:
            NotImplementedError: the store has no such writes.
            DflashError: it cannot be written.
        """
        try:
            return _token(self._obstore.put(self._store, name, data, mode="create" if token is None else token))
        except (self._obstore.exceptions.AlreadyExistsError, self._obstore.exceptions.PreconditionError):
            return None
        except self._obstore.exceptions.NotSupportedError as error:
            raise NotImplementedError(message_line(error)) from error
        except (self._obstore.exceptions.BaseError, OSError) as error:
            if token is not None and isinstance(error, FileNotFoundError):
                return None
            raise DflashError(f"{self.url}/{name}: cannot be written: {message_line(error)}") from error

    def look(self, name: str) -> tuple[bytes, Token] | None:
        """Return a JSON object and the token of its state, or None where there is none.

        Raises:
            CacheMissing: the bucket cannot be reached.
            CacheCorrupt: it is larger than any JSON file of a cache may be.
        """
        return self._if_there(name, lambda: self._get(name, MAX_JSON_BYTES))

    def delete(self, name: str) -> None:
        """Remove an object; nothing where there is none.

        Raises:
            CacheMissing: the bucket cannot be reached.
        """
        self._if_there(name, lambda: self._obstore.delete(self._store, name))

    def _get(self, name: str, most_bytes: int) -> tuple[bytes, Token]:
        found = self._obstore.get(self._store, name)
        size = int(found.meta["size"])
        if size > most_bytes:
            raise CacheCorrupt(f"{self.url}/{name}: {size} bytes, expected at most {most_bytes}")
        return bytes(found.bytes()), _token(found.meta)

    def _if_there(self, name: str, ask: Callable[[], T]) -> T | None:
        """Ask about an object; None where there is none, and only then."""
        try:
            with self._explained(name):
                return ask()
        except CacheMissing as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except DflashError:
            raise
        except FileNotFoundError as error:
            raise CacheMissing(f"{self.url}/{name}: there is no such object") from error
        except (self._obstore.exceptions.BaseError, OSError) as error:
            raise CacheMissing(f"{self.url}/{name}: cannot be read: {message_line(error)}") from error


def _token(meta: Any) -> Token:
    return {key: meta[key] for key in ("e_tag", "version") if meta.get(key)}
