"""Reading a corpus: every row of its files is either usable, or skipped with file, line and reason.

The rows of a corpus are held in memory, at 5 bytes a token (an int32 id and a mask byte): 100 million tokens take
0.5 GB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from ..errors import CorpusError, counted
from ..store.plan import CorpusFile
from .chat import RowProblem
from .rows import CorpusRow, RowEncoder
from .sources import Source

NUM_PLACES_SHOWN = 5
NUM_PLACES_KEPT = 1000


@dataclass(frozen=True, kw_only=True)
class Skip:
    """A row that was left out: where, and why."""

    file: str
    line: int
    reason: str
    detail: str = ""


@dataclass(kw_only=True)
class CorpusRows:
    """The usable rows of a corpus in its own order, what was left out, and how many rows repeat an earlier one."""

    files: tuple[CorpusFile, ...]
    rows: list[CorpusRow] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    num_duplicates: int = 0

    @property
    def num_tokens(self) -> int:
        """The tokens of all usable rows."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def skipped(self) -> dict[str, int]:
        """How many rows were left out, by reason."""
        return dict(Counter(skip.reason for skip in self.skips))

    @property
    def skipped_places(self) -> dict[str, list[str]]:
        """Where rows were left out, `file:line`, by reason; the first thousand of each."""
        places: dict[str, list[str]] = {}
        for skip in self.skips:
            found = places.setdefault(skip.reason, [])
            if len(found) < NUM_PLACES_KEPT:
                found.append(f"{skip.file}:{skip.line}")
        return places

    def notices(self) -> list[str]:
        """One line for each reason of skipping, with the first places, and for cut rows and unmasked turns."""
        lines = []
        details = {skip.reason: skip.detail for skip in reversed(self.skips)}
        for (reason, count), places in zip(self.skipped.items(), self.skipped_places.values(), strict=True):
            more = ", ..." if count > NUM_PLACES_SHOWN else ""
            detail = f" ({details[reason]})" if details[reason] else ""
            lines.append(
                f"skipped {counted(count, 'row')}: {reason}{detail}: {', '.join(places[:NUM_PLACES_SHOWN])}{more}"
            )
        if self.num_duplicates:
            rows = f"{counted(self.num_duplicates, 'row')} repeat{'s' if self.num_duplicates == 1 else ''}"
            lines.append(f"{rows} an earlier row; all are kept, and held out together")
        truncated = sum(row.truncated for row in self.rows)
        if truncated:
            lines.append(f"cut {counted(truncated, 'row')} at the length limit")
        turns = sum(row.num_unmasked_turns for row in self.rows)
        if turns:
            replies = counted(turns, "earlier reply", "earlier replies")
            lines.append(f"{replies} rewritten by the chat template: context only")
        return lines


def read_corpus(
    sources: Sequence[Source],
    tokenizer: Any,
    *,
    vocab_size: int,
    max_length: int | None = None,
    limit_rows: int | None = None,
    limit_tokens: int | None = None,
    strict: bool = False,
    earlier: Sequence[str] = (),
) -> CorpusRows:
    """Read corpus files into rows of token ids with loss masks.

    Args:
        sources: the files and datasets, read in this order.
        tokenizer: the target's.
        vocab_size: rows of the target's embeddings.
        max_length: longer rows are cut there, or skipped where nothing of the reply would be left.
        limit_rows: stop after so many usable rows.
        limit_tokens: stop before the first row with which the total would be more.
        strict: refuse the corpus where a row would be skipped.
        earlier: names of files that are in the cache already; the rows of no new file are named after them.

    Returns:
        The rows, and every row that was left out.

    Raises:
        CorpusError: a file is damaged or has no rows; no row is usable; or, with `strict`, a row is not.
    """
    corpus = CorpusRows(files=tuple(source.file for source in sources))
    encoder = RowEncoder(tokenizer, vocab_size=vocab_size, max_length=max_length)
    seen = _Seen()
    num_tokens = 0
    for source, stem in zip(sources, _stems(sources, earlier), strict=True):
        line = 0
        for line, value in source.rows():
            if limit_rows is not None and len(corpus.rows) >= limit_rows:
                return corpus
            try:
                if isinstance(value, RowProblem):
                    raise value
                row = encoder.encode(value, f"{stem}:{line}", source.name, line)
                content = seen.check(row)
            except RowProblem as problem:
                _skip(corpus, Skip(file=source.name, line=line, reason=problem.reason, detail=problem.detail), strict)
                continue
            num_tokens += row.num_tokens
            if limit_tokens is not None and num_tokens > limit_tokens:
                size = counted(row.num_tokens, "token")
                return _checked(corpus, f"the first row has {size}, over the limit of {limit_tokens}")
            corpus.rows.append(row)
            corpus.num_duplicates += seen.add(row, content)
        if line == 0:
            raise CorpusError(f"{source.place}: there are no rows in it")
    return _checked(corpus, f"none of {counted(len(corpus.skips), 'row')} is usable")


def _checked(corpus: CorpusRows, problem: str) -> CorpusRows:
    if not corpus.rows:
        raise CorpusError("; ".join([f"the corpus has no usable row: {problem}", *corpus.notices()]))
    return corpus


def _skip(corpus: CorpusRows, skip: Skip, strict: bool) -> None:
    if strict:
        detail = f" ({skip.detail})" if skip.detail else ""
        raise CorpusError(f"{skip.file}:{skip.line}: {skip.reason}{detail}; without --strict the row is skipped")
    corpus.skips.append(skip)


class _Seen:
    """The ids and the contents of the rows so far."""

    def __init__(self) -> None:
        self._by_id: dict[str, tuple[str, int, bytes]] = {}
        self._contents: set[bytes] = set()

    def check(self, row: CorpusRow) -> bytes:
        """Return the digest of a row's tokens and mask. RowProblem: its id is taken; which row it means is unknown."""
        content = xxhash.xxh3_128_digest(row.input_ids.tobytes() + row.loss_mask.tobytes())
        if row.id in self._by_id:
            file, line, earlier = self._by_id[row.id]
            other = "" if content == earlier else ", other content"
            raise RowProblem(
                f"the id of an earlier row{other}",
                f"{row.id!r} is at {file}:{line}; rows without an id are named by file and line",
            )
        return content

    def add(self, row: CorpusRow, content: bytes) -> bool:
        """Remember a row; tell whether its content is that of an earlier one."""
        known = content in self._contents
        self._by_id[row.id] = (row.file, row.line, content)
        self._contents.add(content)
        return known


def _stems(sources: Sequence[Source], earlier: Sequence[str]) -> list[str]:
    """A different name for each file: its stem, numbered where two files share one."""
    stems: list[str] = []
    for name in [*earlier, *(source.name for source in sources)]:
        first = Path(name.removesuffix(".gz")).stem
        stem, number = first, 2
        while stem in stems:
            stem, number = f"{first}-{number}", number + 1
        stems.append(stem)
    return stems[len(earlier) :]
