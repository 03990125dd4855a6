"""Reading corpus files: JSON lines, every row either usable or skipped with file, line and reason.

A byte order mark, carriage returns and blank lines change nothing. The rows of a corpus are held in memory, at 5 bytes
a token (an int32 id and a mask byte): 100 million tokens take 0.5 GB.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CorpusError
from ..store.plan import CorpusFile
from .chat import RowProblem
from .rows import CorpusRow, RowEncoder

NUM_PLACES_SHOWN = 5
OTHER_FORMATS = (".gz", ".zst", ".bz2", ".xz", ".parquet", ".arrow", ".csv")


@dataclass(frozen=True, kw_only=True)
class Skip:
    """A row that was left out: where, and why."""

    file: str
    line: int
    reason: str
    detail: str = ""


@dataclass(kw_only=True)
class CorpusRows:
    """The usable rows of a corpus in its own order, and what was left out."""

    files: tuple[CorpusFile, ...]
    rows: list[CorpusRow] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """The tokens of all usable rows."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def skipped(self) -> dict[str, int]:
        """How many rows were left out, by reason."""
        return dict(Counter(skip.reason for skip in self.skips))

    def notices(self) -> list[str]:
        """One line for each reason of skipping, with the first places, and for cut rows and unmasked turns."""
        lines = []
        for reason, count in self.skipped.items():
            found = [skip for skip in self.skips if skip.reason == reason]
            places = ", ".join(f"{skip.file}:{skip.line}" for skip in found[:NUM_PLACES_SHOWN])
            more = ", ..." if count > NUM_PLACES_SHOWN else ""
            detail = f" ({found[0].detail})" if found[0].detail else ""
            lines.append(f"skipped {count} rows: {reason}{detail}: {places}{more}")
        truncated = sum(row.truncated for row in self.rows)
        if truncated:
            lines.append(f"cut {truncated} rows at the length limit")
        turns = sum(row.num_unmasked_turns for row in self.rows)
        if turns:
            lines.append(f"{turns} earlier replies are rewritten by the chat template, so they are context only")
        return lines


def read_corpus(
    paths: Sequence[Path],
    tokenizer: Any,
    *,
    vocab_size: int,
    max_length: int | None = None,
    limit_rows: int | None = None,
    limit_tokens: int | None = None,
    strict: bool = False,
) -> CorpusRows:
    """Read JSON-lines files into rows of token ids with loss masks.

    Args:
        paths: the files, read in this order.
        tokenizer: the target's.
        vocab_size: rows of the target's embeddings.
        max_length: longer rows are cut there, or skipped where nothing of the reply would be left.
        limit_rows: stop after so many usable rows.
        limit_tokens: stop before the first row with which the total would be more.
        strict: refuse the corpus where a row would be skipped.

    Returns:
        The rows, and every row that was left out.

    Raises:
        CorpusError: a file is missing, empty or of another kind; two rows have the same id (which of the two is meant
            cannot be told later on); an id lies outside the vocabulary; no row is usable; or, with `strict`, a row is
            not.
    """
    check_files(paths)
    corpus = CorpusRows(files=tuple(_corpus_file(path) for path in paths))
    encoder = RowEncoder(tokenizer, vocab_size=vocab_size, max_length=max_length)
    places: dict[str, str] = {}
    num_tokens = 0
    for path, stem in zip(paths, _stems(paths), strict=True):
        num_lines = 0
        for line, data in _lines(path):
            num_lines += 1
            if limit_rows is not None and len(corpus.rows) >= limit_rows:
                return corpus
            try:
                row = encoder.encode(_decode(data), f"{stem}:{line}", path.name, line)
            except RowProblem as problem:
                _skip(corpus, Skip(file=path.name, line=line, reason=problem.reason, detail=problem.detail), strict)
                continue
            _check_unique(places, row.id, f"{path}:{line}")
            num_tokens += row.num_tokens
            if limit_tokens is not None and num_tokens > limit_tokens:
                return _checked(corpus, f"the first row has {row.num_tokens} tokens, over the limit of {limit_tokens}")
            corpus.rows.append(row)
        if num_lines == 0:
            raise CorpusError(f"{path}: the file has no rows, only blank lines")
    return _checked(corpus, f"none of the {len(corpus.skips)} rows is usable")


def check_files(paths: Sequence[Path]) -> None:
    """Check that the corpus files are there and can be JSON lines.

    Raises:
        CorpusError: naming the file and what is wrong with it.
    """
    if not paths:
        raise CorpusError("no corpus file is given")
    for path in paths:
        if path.is_dir():
            raise CorpusError(f"{path}: this is a folder; give JSON-lines files")
        if not path.is_file():
            raise CorpusError(f"{path}: there is no such corpus file")
        if path.suffix.lower() in OTHER_FORMATS:
            raise CorpusError(f"{path}: only plain JSON lines are read; convert {path.suffix} files first")
        if path.stat().st_size == 0:
            raise CorpusError(f"{path}: the file is empty")
    resolved = [path.resolve() for path in paths]
    for path, real in zip(paths, resolved, strict=True):
        if resolved.count(real) > 1:
            raise CorpusError(f"{path}: this corpus file is given twice")


def _checked(corpus: CorpusRows, problem: str) -> CorpusRows:
    if not corpus.rows:
        raise CorpusError("; ".join([f"the corpus has no usable row: {problem}", *corpus.notices()]))
    return corpus


def _skip(corpus: CorpusRows, skip: Skip, strict: bool) -> None:
    if strict:
        detail = f" ({skip.detail})" if skip.detail else ""
        raise CorpusError(f"{skip.file}:{skip.line}: {skip.reason}{detail}; without --strict the row is skipped")
    corpus.skips.append(skip)


def _check_unique(places: dict[str, str], row_id: str, place: str) -> None:
    if row_id in places:
        raise CorpusError(
            f"row id {row_id!r} is used twice, at {places[row_id]} and at {place}: make the ids different, or leave "
            "them out (rows are then named by file and line)"
        )
    places[row_id] = place


def _stems(paths: Sequence[Path]) -> list[str]:
    """A different name for each file: its stem, numbered where two files share one."""
    stems: list[str] = []
    for path in paths:
        stem, number = path.stem, 2
        while stem in stems:
            stem, number = f"{path.stem}-{number}", number + 1
        stems.append(stem)
    return stems


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, bytes) of the lines that are not blank."""
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            content = data.removeprefix(codecs.BOM_UTF8) if number == 1 else data
            if content.strip():
                yield number, content


def _decode(data: bytes) -> object:
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowProblem("not UTF-8", f"byte {error.start + 1} of the line is 0x{data[error.start]:02x}") from error
    except (ValueError, RecursionError) as error:
        raise RowProblem("not JSON", str(error)) from error


def _corpus_file(path: Path) -> CorpusFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return CorpusFile(name=path.name, sha256=digest, num_bytes=path.stat().st_size)
