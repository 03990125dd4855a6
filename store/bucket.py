"""Object storage: the files of a cache under a URL, s3://bucket/prefix, gs://bucket/prefix or file:///folder.

obstore moves the bytes (docs/log.md has its cost beside fsspec); it comes with the extra `buckets`. Credentials,
region and endpoint are those its variables name, the same that the provider's own tools read: AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS, ... An object appears whole or not at all: that is each put's promise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..errors import BucketError, CacheCorrupt, CacheMissing, DflashError, message_line
from .connect import check_url, connect, refusal
from .durable import temporary_name
from .layout import MAX_JSON_BYTES

STREAM_BYTES = 2**22
REQUESTS = 8
"""Requests to a bucket at once."""

PATIENCE_SECONDS = 120.0
"""How long a request is tried again once the bucket has answered one: a server may start again."""
PAUSE_SECONDS = 1.0
AGAIN = "; run the same command again when it can be reached"

log = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")
Token = dict[str, str]  # what a store calls the state of an object: e_tag, version


def is_url(place: object) -> bool:
    """Tell whether a cache's place is a URL and not a folder."""
    return isinstance(place, str) and "://" in place


class _Silence(BucketError):
    """The bucket did not answer, or said that it failed: it may answer later."""


def _patiently(ask: Callable[Concatenate[Bucket, P], T]) -> Callable[Concatenate[Bucket, P], T]:
    """Let a method of a bucket that has answered before ask again while it does not. Here Ctrl-C is heard.

    The first of the requests that find it silent logs a warning: the log's default is a line to stderr.
    """

    @wraps(ask)
    def asking(bucket: Bucket, /, *args: P.args, **kwargs: P.kwargs) -> T:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                answer = ask(bucket, *args, **kwargs)
            except _Silence as silence:
                if not bucket.is_waited_for or time.monotonic() >= deadline:
                    raise
                if not bucket.is_silent:
                    bucket.is_silent = True
                    log.warning("%s; tried again for up to %g s", str(silence).removesuffix(AGAIN), PATIENCE_SECONDS)
                time.sleep(PAUSE_SECONDS)
            else:
                bucket.is_silent = False
                return answer

    return asking


class Bucket:
    """The objects under one URL, by their path below it.

    Attributes:
        url: where they are.
        is_waited_for: whether it has answered, so that a silence may pass.
        is_silent: whether it is being waited for.

    Args:
        url: where they are.
        create: make the folder of a file:// URL; a bucket is never made.

    Raises:
        ConfigError: the URL or a variable of the provider is not valid, or the extra is not installed.
        CacheMissing: there is no folder of a file:// URL.
    """

    def __init__(self, url: str, *, create: bool = False) -> None:
        self.url = url.rstrip("/")
        check_url(self.url)
        self._store = connect(self.url, create=create)
        self.is_waited_for = self.is_silent = False
        self._given_up = False
        import obstore  # noqa: PLC0415 - an extra, there now

        self._obstore: Any = obstore

    @_patiently
    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes, or None where there is none.

        Raises:
            BucketError: the bucket cannot be read.
        """
        found = self._if_there(name, lambda: self._obstore.head(self._store, name))
        return None if found is None else int(found["size"])

    @_patiently
    def sizes(self, prefix: str) -> dict[str, int]:
        """Return path and size of every object below a prefix."""
        with self._explained(prefix):
            batches = self._obstore.list(self._store, prefix=prefix)
            return {entry["path"]: int(entry["size"]) for batch in batches for entry in batch}

    @_patiently
    def read(self, name: str, most_bytes: int) -> bytes:
        """Return a small object whole.

        Raises:
            CacheMissing: there is none.
            BucketError: the bucket cannot be read.
            CacheCorrupt: it is larger than that.
        """
        with self._explained(name):
            return self._get(name, most_bytes)[0]

    @_patiently
    def download(self, name: str, path: Path, num_bytes: int) -> None:
        """Stream an object into a file; the file is there whole or not at all.

        Raises:
            CacheMissing: there is no such object.
            CacheCorrupt: it has another size.
            BucketError: the bucket cannot be read.
            OSError: the file cannot be written.
        """
        with self._explained(name, "; the cache is damaged, `dflash cache repair` makes it again"):
            found = self._obstore.get(self._store, name)
        size = int(found.meta["size"])
        if size != num_bytes:
            raise CacheCorrupt(f"{self.url}/{name}: expected {num_bytes} bytes, found {size}")
        blocks = iter(found.stream(min_chunk_size=STREAM_BYTES))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(temporary_name(path.name))
        try:
            with temporary.open("wb") as file:
                while (block := self._next(name, blocks)) is not None:
                    file.write(block)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _next(self, name: str, blocks: Iterator[Any]) -> Any:
        with self._explained(name):
            return next(blocks, None)

    @_patiently
    def upload(self, name: str, content: Path | bytes) -> None:
        """Put an object, whole or not at all.

        Raises:
            BucketError: it cannot be written.
        """
        try:
            self._obstore.put(self._store, name, content)
        except (self._obstore.exceptions.BaseError, OSError) as error:
            raise self._refused(name, "written", error) from error

    @_patiently
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
            BucketError: it cannot be written.
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
            raise self._refused(name, "written", error) from error

    @_patiently
    def look(self, name: str) -> tuple[bytes, Token] | None:
        """Return a JSON object and the token of its state, or None where there is none.

        Raises:
            BucketError: the bucket cannot be read.
            CacheCorrupt: it is larger than any JSON file of a cache may be.
        """
        return self._if_there(name, lambda: self._get(name, MAX_JSON_BYTES))

    @_patiently
    def delete(self, name: str) -> None:
        """Remove an object; nothing where there is none.

        Raises:
            BucketError: the bucket cannot be read.
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
    def pool(self) -> Iterator[ThreadPoolExecutor]:
        """Give a pool of threads for requests. Where the block is interrupted, those under way are not tried again."""
        with ThreadPoolExecutor(REQUESTS) as pool:
            try:
                yield pool
            except BaseException as error:
                if not isinstance(error, Exception):
                    self.give_up()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def give_up(self) -> None:
        """Try no request again from now on."""
        self._given_up, self.is_waited_for = True, False

    @contextmanager
    def _explained(self, name: str, remedy: str = "") -> Iterator[None]:
        """Turn a store's errors into ours; `remedy` is for an object that is not there."""
        try:
            yield
        except DflashError:
            raise
        except FileNotFoundError as error:
            if refusal(self.url, error):
                raise self._refused(name, "read", error) from error
            raise CacheMissing(f"{self.url}/{name}: there is no such object{remedy}") from error
        except (self._obstore.exceptions.BaseError, OSError) as error:
            raise self._refused(name, "read", error) from error
        self.is_waited_for = not self._given_up

    def _refused(self, name: str, done: str, error: BaseException) -> BucketError:
        known = refusal(self.url, error)
        if known:
            return BucketError(f"{self.url}: {known}")
        kind = _Silence if isinstance(error, self._obstore.exceptions.GenericError) else BucketError
        return kind(f"{self.url}/{name}: cannot be {done}: {message_line(error)}{AGAIN}")


def _token(meta: Any) -> Token:
    return {key: meta[key] for key in ("e_tag", "version") if meta.get(key)}
