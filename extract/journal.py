"""The rows that a generation has written so far: one line each as they arrive, whole and in order at the end.

OUT.part grows in the order of arrival; a line cut short by a crash is dropped. OUT itself appears at once, in the order
of the prompts, and OUT.part goes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..errors import CacheMismatch
from ..store.durable import explained, fsync_path
from ..target.prompts import Prompt
from .reply import asked


class Journal:
    """Rows by id, on disk; in memory only where each line lies. One writer at a time (the caller holds the lock).

    Raises (on opening):
        CacheMismatch: OUT or OUT.part holds rows of other prompts, of another model or limit, or no rows at all.
    """

    def __init__(self, out: Path, prompts: Sequence[Prompt], model: str, max_tokens: int) -> None:
        self.out, self.part = out, out.with_name(f"{out.name}.part")
        self._prompts = {prompt.id: prompt for prompt in prompts}
        self._settings = {"model": model, "max_tokens": max_tokens}
        self._places: dict[str, tuple[int, int]] = {}
        with explained(out):
            self.finished = out.exists() and not self.part.exists() and self._index(out)
            if not self.finished:
                if out.exists() and not self.part.exists():
                    beside = out.with_name(f".{out.name}.copy")
                    shutil.copyfile(out, beside)
                    beside.replace(self.part)
                self._index(self.part)
                self._file = self.part.open("ab")

    @property
    def ids(self) -> set[str]:
        """The ids of the rows that are there."""
        return set(self._places)

    def append(self, row: dict[str, Any]) -> None:
        """Add a row; once this returns, a killed process has not lost it."""
        line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        with explained(self.out):
            start = self._file.tell()
            self._file.write(line)
            self._file.flush()
        self._places[row["id"]] = (start, len(line))

    def finish(self) -> None:
        """Put all rows into OUT, in the order of the prompts."""
        beside = self.out.with_name(f".{self.out.name}.writing")
        with explained(self.out), self.part.open("rb") as source:
            with beside.open("wb") as target:
                for place in (self._places[name] for name in self._prompts if name in self._places):
                    source.seek(place[0])
                    target.write(source.read(place[1]))
            fsync_path(beside)
            beside.replace(self.out)
            fsync_path(self.out.parent)
        self.close()
        self.part.unlink()

    def close(self) -> None:
        """Close the file; the rows stay."""
        if not self.finished:
            self._file.close()

    def _index(self, path: Path) -> bool:
        """Find every whole line; return whether all prompts have one. A torn last line of OUT.part is cut off."""
        self._places = {}
        position = 0
        if path.exists():
            with path.open("rb" if path == self.out else "r+b") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        if path == self.out:
                            self._refuse(path, number, "is cut short")
                        file.truncate(position)
                        break
                    self._places.setdefault(self._check(path, number, line), (position, len(line)))
                    position += len(line)
        return len(self._places) == len(self._prompts)

    def _check(self, path: Path, number: int, line: bytes) -> str:
        try:
            row = json.loads(line)
            name = str(row["id"])
        except (ValueError, KeyError, TypeError):
            self._refuse(path, number, "is not a row of a generation")
        if name not in self._prompts:
            self._refuse(path, number, f"has the id {name!r}, which is not among the prompts")
        for key, wanted in self._settings.items():
            if row.get(key) != wanted:
                self._refuse(path, number, f"was written with {key} {row.get(key)!r}, now {wanted!r}")
        for key, value in asked(self._prompts[name]).items():
            found = row.get(key)
            if found != value and not (key == "messages" and isinstance(found, list) and found[: len(value)] == value):
                self._refuse(path, number, f"answers another {key} of id {name!r} than the prompts file holds now")
        return name

    def _refuse(self, path: Path, number: int, problem: str) -> NoReturn:
        raise CacheMismatch(f"{path}:{number} {problem}; give the same inputs to go on, or another --out")
