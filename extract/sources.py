"""Where corpus rows come from: JSON lines (plain or .gz), a JSON array, Parquet, a dataset on disk or on the hub.

Every source yields the same decoded values for the same rows, each with its number: the line of a JSON-lines file,
else the row, both from 1. Parquet and datasets fill fields that a row lacks with null, so null fields are left out.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CorpusError, message_line
from ..store.plan import CorpusFile
from .chat import RowProblem
from .rows import FIELDS

MAX_LINE_BYTES = 2**28
BATCH_ROWS = 256
SUFFIXES = (".jsonl", ".json", ".ndjson", ".gz", ".parquet")
OTHER_SUFFIXES = (".zst", ".bz2", ".xz", ".zip", ".tar", ".arrow", ".csv", ".tsv")
HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w.-]+)(:(?P<config>[\w.-]+)(?=:))?(:(?P<split>[\w.-]+))?")

NumberedRow = tuple[int, "object | RowProblem"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One corpus file or dataset.

    Attributes:
        place: its path or name, for messages.
        name: its file name, or the dataset's name.
        file: its name, size and sha256. A dataset's are those of its rows as canonical JSON lines, since the files it
            is kept in depend on who wrote them.
        rows: yields each row's number and decoded value, or the problem with it.
    """

    place: str
    name: str
    file: CorpusFile
    rows: Callable[[], Iterator[NumberedRow]]


def open_sources(corpus: Sequence[Path | str]) -> list[Source]:
    """Open corpus files and datasets, in order.

    Args:
        corpus: paths of files or of folders written by `save_to_disk`; names of hub datasets, `org/name`,
            `org/name:split` or `org/name:config:split`.

    Raises:
        CorpusError: naming the file and what is wrong with it.
    """
    if not corpus:
        raise CorpusError("no corpus file is given")
    resolved = [str(Path(entry).resolve()) for entry in corpus]
    for entry, real in zip(corpus, resolved, strict=True):
        if resolved.count(real) > 1:
            raise CorpusError(f"{entry}: this corpus file is given twice")
    return [_open(entry) for entry in corpus]


def _open(entry: Path | str) -> Source:
    path = Path(entry)
    if path.is_dir():
        return _open_dataset(path.name, str(path), _load_from_disk(path))
    if not path.exists():
        hub = HUB_NAME.fullmatch(str(entry))
        if hub is None or path.suffix.lower() in SUFFIXES + OTHER_SUFFIXES:
            raise CorpusError(f"{path}: there is no such corpus file")
        return _open_dataset(hub["name"].split("/")[1], str(entry), _load_from_hub(str(entry), hub))
    if path.suffix.lower() in OTHER_SUFFIXES:
        raise CorpusError(f"{path}: {path.suffix} files are not read: convert it to JSON lines, .jsonl.gz or Parquet")
    if path.stat().st_size == 0:
        raise CorpusError(f"{path}: the file is empty")
    readers = {".gz": _gzip_lines, ".json": _json_rows, ".parquet": _parquet_rows}
    reader = readers.get(path.suffix.lower(), _plain_lines)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    record = CorpusFile(name=path.name, sha256=digest, num_bytes=path.stat().st_size)
    return Source(place=str(path), name=path.name, file=record, rows=lambda: reader(path))


# --- JSON -------------------------------------------------------------------------------------------------------


def _plain_lines(path: Path) -> Iterator[NumberedRow]:
    with path.open("rb") as file:
        yield from _lines(file)


def _gzip_lines(path: Path) -> Iterator[NumberedRow]:
    number = 0
    try:
        with gzip.open(path, "rb") as file:
            for number, value in _lines(file):
                yield number, value
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CorpusError(
            f"{path}: not a whole gzip file, after line {number}: {error}; compress or download it again"
        ) from error


def _lines(file: BinaryIO | gzip.GzipFile) -> Iterator[NumberedRow]:
    """Yield the lines that are not blank."""
    number = 0
    while data := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(data) > MAX_LINE_BYTES:
            while data and not data.endswith(b"\n"):
                data = file.readline(MAX_LINE_BYTES)
            yield number, RowProblem("the line is too long", f"more than {MAX_LINE_BYTES} bytes")
            continue
        content = data.removeprefix(codecs.BOM_UTF8) if number == 1 else data
        if content.strip():
            yield number, _decode(content)


def _decode(data: bytes) -> object:
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RowProblem("not UTF-8", f"byte {error.start + 1} of the line is 0x{data[error.start]:02x}")
    except (ValueError, RecursionError) as error:
        return RowProblem("not JSON", str(error))


def _json_rows(path: Path) -> Iterator[NumberedRow]:
    """Yield the rows of a .json file: of its one array, or of its lines where it is no array."""
    with path.open("rb") as file:
        head = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
    if head.startswith(b"[") and isinstance(rows := _decode(path.read_bytes().removeprefix(codecs.BOM_UTF8)), list):
        yield from enumerate(rows, 1)
    else:
        yield from _plain_lines(path)


# --- columns ----------------------------------------------------------------------------------------------------


def _parquet_rows(path: Path) -> Iterator[NumberedRow]:
    import pyarrow  # noqa: PLC0415 - slow to import, and only Parquet needs it
    from pyarrow import parquet  # noqa: PLC0415

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = _known_columns(str(path), file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, _without_nulls(row)
    except (pyarrow.ArrowException, OSError) as error:
        raise CorpusError(f"{path}: cannot be read as Parquet, after row {number}: {message_line(error)}") from error


def _open_dataset(name: str, place: str, dataset: Any) -> Source:
    chosen = dataset.select_columns(_known_columns(place, dataset.column_names))
    digest, num_bytes = hashlib.sha256(), 0
    for row in chosen:
        line = json.dumps(_without_nulls(row), sort_keys=True, separators=(",", ":"), default=str).encode() + b"\n"
        digest.update(line)
        num_bytes += len(line)
    record = CorpusFile(name=name, sha256=digest.hexdigest(), num_bytes=num_bytes)
    return Source(
        place=place,
        name=name,
        file=record,
        rows=lambda: enumerate(map(_without_nulls, chosen), 1),
    )


def _load_from_disk(path: Path) -> Any:
    import datasets  # noqa: PLC0415 - slow to import, and few corpora need it

    if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise CorpusError(f"{path}: this folder is no dataset written by save_to_disk; give the files in it")
    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:
        raise CorpusError(f"{path}: the dataset cannot be loaded: {message_line(error)}") from error
    return _only_split(dataset, str(path), "/")


def _load_from_hub(place: str, parts: re.Match[str]) -> Any:
    import datasets  # noqa: PLC0415

    datasets.disable_progress_bars()
    try:
        dataset = datasets.load_dataset(parts["name"], parts["config"], split=parts["split"])
    except Exception as error:
        raise CorpusError(
            f"{place}: there is no such file, and no such dataset could be loaded from the hub: {message_line(error)}"
        ) from error
    return _only_split(dataset, place, ":")


def _only_split(dataset: Any, place: str, separator: str) -> Any:
    if not hasattr(dataset, "keys"):
        return dataset
    splits = sorted(dataset.keys())
    if len(splits) != 1:
        choices = " or ".join(f"{place}{separator}{split}" for split in splits)
        raise CorpusError(f"{place}: the dataset has {len(splits)} splits; give one of them: {choices}")
    return dataset[splits[0]]


def _known_columns(place: str, columns: Sequence[str]) -> list[str]:
    known = [name for name in columns if name in FIELDS]
    if not set(known) - {"id", "tools"}:
        raise CorpusError(f"{place}: none of its columns is known: expected {', '.join(FIELDS)}; found {list(columns)}")
    return known


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value
