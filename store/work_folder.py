"""Where a writer to a bucket builds its shards: a folder of the local disk that it finds again after a crash."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from uuid import uuid4

import xxhash
from filelock import FileLock, Timeout

from .durable import explained, write_atomic


class WorkFolder:
    """A folder on the local disk for one writer to a bucket; a writer that is started again finds the one it had.

    Attributes:
        path: the folder, WORK/<hash of the URL>/<machine>-<number>. No other process has it: a lock beside it is held.
        owner: the name of the folder's writer, the same each time, and nobody else's.
    """

    def __init__(self, work: Path, url: str) -> None:
        parent = work.absolute() / xxhash.xxh3_64_hexdigest(url.rstrip("/").encode())
        machine = "".join(letter if letter.isalnum() else "-" for letter in socket.gethostname())
        with explained(work, "--work"):
            parent.mkdir(parents=True, exist_ok=True)
            number = 0
            while not self._take(parent / f"{machine}-{number}"):
                number += 1
            owner = self.path / "owner"
            if not owner.is_file():
                self.path.mkdir(exist_ok=True)
                write_atomic(owner, uuid4().hex.encode())
            self.owner = owner.read_text()

    def _take(self, path: Path) -> bool:
        self.path = path
        self._lock = FileLock(f"{path}.lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            return False
        return True

    def close(self, *, remove: bool) -> None:
        """Leave the folder to the next writer, or remove what it holds."""
        if remove:
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()
