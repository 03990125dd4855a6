"""Where rows came from: figures by source, and replies that show where drafts were accepted.

A cache does not keep a row's source; the corpus does. The two are joined by row id.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..drafter.walk import RowWalk
from ..errors import CorpusError, TargetError
from ..target.prompts import numbered_lines
from .baselines import TokenRow
from .figures import walk_figures

UNNAMED = "no source"


def read_sources(paths: Sequence[Path], row_ids: Sequence[str]) -> dict[str, str]:
    """Return the source of every row of `row_ids`: the field `source` of the line with its id in JSON-lines files.

    A line without an id has the one that extraction gives it: the file's stem and the line's number. A row that no
    file holds, or whose line names no source, has the source `no source`.

    Raises:
        CorpusError: a file is not JSON lines, or none of the rows is in any.
    """
    found: dict[str, str] = {}
    for path in paths:
        with path.open("rb") as file:
            for number, line in numbered_lines(file):
                value = _object(line, path, number)
                name = value.get("id")
                key = f"{path.stem}:{number}" if name in (None, "") else str(name)
                source = value.get("source")
                found[key] = source if isinstance(source, str) and source else UNNAMED
    if not any(row_id in found for row_id in row_ids):
        raise CorpusError(
            f"{', '.join(map(str, paths))}: none of the rows evaluated, such as {row_ids[0]!r}, is in these files: "
            "give the corpus that the cache was extracted from"
        )
    return {row_id: found.get(row_id, UNNAMED) for row_id in row_ids}


def _object(line: bytes, path: Path, number: int) -> Mapping[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{path}:{number}: not JSON lines ({error}); give the corpus's JSON-lines files") from error
    return value if isinstance(value, dict) else {}


def by_source(walks: Sequence[RowWalk], sources: Sequence[str], block_size: int) -> dict[str, Any]:
    """Return `walk_figures` of each source, in the order of its name."""
    groups: dict[str, list[RowWalk]] = defaultdict(list)
    for walk, source in zip(walks, sources, strict=True):
        groups[source].append(walk)
    return {name: walk_figures(groups[name], block_size) for name in sorted(groups)}


def sample_rows(
    rows: Sequence[TokenRow],
    walks: Sequence[RowWalk],
    row_ids: Sequence[str],
    sources: Sequence[str],
    *,
    per_source: int,
    target_dir: Path,
) -> list[dict[str, Any]]:
    """Return the first rows of each source, as text that shows which tokens were accepted drafts.

    Args:
        rows, walks, row_ids, sources: of each row evaluated, in one order.
        per_source: how many rows of each source.
        target_dir: a folder with the target's tokenizer.

    Returns:
        For each row: row, source, tau, verifications, and pieces [text, accepted], the reply cut where drafts begin and
        end. What is not accepted is the target's own: one token of each verification, and the first of the reply.

    Raises:
        TargetError: the tokenizer cannot be loaded.
    """
    tokenizer = _tokenizer(target_dir)
    taken: dict[str, int] = defaultdict(int)
    samples = []
    for row, walk, row_id, source in zip(rows, walks, row_ids, sources, strict=True):
        if taken[source] < per_source:
            taken[source] += 1
            samples.append(
                {
                    "row": row_id,
                    "source": source,
                    "tau": walk.tau,
                    "verifications": walk.verifications,
                    "pieces": accepted_pieces(row, walk, tokenizer),
                }
            )
    return samples


def accepted_pieces(row: TokenRow, walk: RowWalk, tokenizer: Any) -> list[list[Any]]:
    """Return [text, accepted] pieces of the supervised tokens, which joined are their text."""
    drafted = {
        anchor + 1 + slot for anchor, count in zip(walk.anchors, walk.accepted, strict=True) for slot in range(count)
    }
    places = [place for place, supervised in enumerate(row.loss_mask.tolist()) if supervised]
    ids = [int(row.tokens[place]) for place in places]
    text = str(tokenizer.decode(ids))
    cuts = [n for n in range(1, len(ids)) if (places[n] in drafted) != (places[n - 1] in drafted)]
    pieces: list[list[Any]] = []
    done = 0
    for first, last in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        # a token may hold part of a character: it is shown whole with the token that ends it
        end = len(text) if last == len(ids) else max(done, _shared(text, str(tokenizer.decode(ids[:last]))))
        if end > done:
            pieces.append([text[done:end], places[first] in drafted])
        done = end
    return pieces


def _shared(one: str, other: str) -> int:
    """Return how many characters two texts have in common from the start."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds

    try:
        return AutoTokenizer.from_pretrained(directory)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TargetError(f"{directory}: the target's tokenizer cannot be loaded: {reason}") from error
