"""The error types of the project.

Every error a user can cause is a `DflashError`; its message says what is wrong, where, what was expected and
found, and what to do next. The command line prints it as one line and exits with code 1.
"""

from __future__ import annotations


class DflashError(Exception):
    """Root of all errors that this package raises on purpose."""


class ConfigError(DflashError, ValueError):
    """An option, recipe or configuration value is not valid."""


class CacheMissing(DflashError, FileNotFoundError):
    """There is no cache, or a file of it is gone."""


class CacheIncomplete(CacheMissing):
    """The cache has a plan but no manifest: its extraction has not finished."""


class CacheCorrupt(DflashError, ValueError):
    """A file of the cache is not what the manifest says."""


class BucketError(DflashError):
    """A bucket cannot be read or written now; nothing is known of what it holds."""


class CacheMismatch(ConfigError):
    """An output exists that was made from other inputs."""


class CorpusError(DflashError, ValueError):
    """A corpus file cannot be read as rows."""


class TargetError(DflashError, ValueError):
    """The target model cannot be loaded or is not understood."""


class CheckpointError(DflashError, ValueError):
    """A drafter or training checkpoint cannot be loaded."""


class TrainingError(DflashError, RuntimeError):
    """Training cannot go on."""


def message_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number and its noun for a message: `1 row`, `1,234 rows`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
