"""Writing that survives a crash: beside, fsync, rename, fsync of the parent."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import DflashError
from .layout import TEMP_PREFIX

FULL = (errno.ENOSPC, errno.EDQUOT)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def explained(cache: Path, option: str = "--out") -> Iterator[None]:
    """Turn the errors of a full disk or a folder that may not be written into one line that says what to do.

    `option` is the one that names another folder.

    Raises:
        DflashError: instead of such an OSError; others pass.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise DflashError(
                f"{cache}: no space left on the disk; the shards written so far are safe: free some space and run the "
                "same command again"
            ) from error
        if error.errno in FORBIDDEN:
            raise DflashError(f"{cache}: cannot be written ({error.strerror}); use another {option}") from error
        raise


@contextmanager
def explained_temporary(what: str) -> Iterator[None]:
    """Say where a disk that fails is, when it is the one below TMPDIR and the user has not named it.

    Raises:
        DflashError: instead of an OSError.
    """
    try:
        yield
    except DflashError:
        raise
    except OSError as error:
        raise DflashError(
            f"{tempfile.gettempdir()}: {error.strerror or error}; {what} is kept there meanwhile: free some space, or "
            "set TMPDIR"
        ) from error


def fsync_path(path: Path) -> None:
    """Flush one file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_name(name: str) -> str:
    """Return a name beside `name` to write under before it is renamed."""
    return f"{TEMP_PREFIX}{name}-{secrets.token_hex(4)}"


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that, whatever happens, the path holds the old content or the new, never a part."""
    temporary = path.with_name(temporary_name(path.name))
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def make_temporary_dir(parent: Path, name: str) -> Path:
    """Make a folder beside its final place, with the permissions of any other folder (not mkdtemp's 0700)."""
    directory = parent / temporary_name(name)
    directory.mkdir()
    return directory


def commit_dir(temporary: Path, final: Path) -> None:
    """Flush every file of a folder, then rename it into place. The final place must be free."""
    umask = os.umask(0)
    os.umask(umask)
    for path in sorted(temporary.rglob("*")):
        if path.is_file():
            path.chmod(0o666 & ~umask)  # some libraries write 0600: another user must be able to read a cache
        fsync_path(path)
    fsync_path(temporary)
    temporary.rename(final)
    fsync_path(final.parent)


@contextmanager
def filling_dir(final: Path, commit: Callable[[Path, Path], None]) -> Iterator[Path]:
    """Give a folder beside `final` to fill, and commit it there at the end; after an error nothing of it is left.

    Args:
        final: where the folder shall be.
        commit: `commit_dir`, or what else puts (temporary, final) in place.
    """
    temporary = make_temporary_dir(final.parent, final.name)
    try:
        yield temporary
        commit(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_stale(parent: Path, name: str = "") -> None:
    """Remove what killed writers left beside a final place. Call it while nobody else may write there.

    Args:
        parent: the folder of the final place.
        name: the final place; all of the folder where it is empty.
    """
    for path in parent.glob(f"{TEMP_PREFIX}{name}-*" if name else f"{TEMP_PREFIX}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
