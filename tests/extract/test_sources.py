"""The same rows from every file format; what cannot be read is one line that names the file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.errors import CorpusError
from dflash_pipeline.extract import sources
from dflash_pipeline.extract.corpus import CorpusRows, read_corpus
from dflash_pipeline.extract.rows import CorpusRow, RowEncoder
from dflash_pipeline.extract.sources import open_sources
from dflash_pipeline.store.plan import hash_prompt
from dflash_pipeline.store.splits import heldout_rows

TURNS = [[("why", "because it is"), ("and then?", "nothing more")], [("add 2 and 3", "2 + 3 = 5, so five")]]
CHAT = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "because it is"}]


def rows_of(form: str, tokenizer: Any) -> list[dict[str, Any]]:
    """The same two conversations in one of the forms."""
    roles = ("user", "assistant")
    messages = [
        [{"role": role, "content": said} for turn in turns for role, said in zip(roles, turn, strict=True)]
        for turns in TURNS
    ]
    if form == "messages":
        return [{"id": f"r{n}", "messages": value} for n, value in enumerate(messages)]
    if form == "conversations":
        names = {"user": "human", "assistant": "gpt"}
        return [
            {"id": f"r{n}", "conversations": [{"from": names[m["role"]], "value": m["content"]} for m in value]}
            for n, value in enumerate(messages)
        ]
    encoded = read(tokenizer, rows_of("messages", tokenizer))
    return [{"id": row.id, "input_ids": row.input_ids.tolist(), "loss_mask": row.loss_mask.tolist()} for row in encoded]


def read(tokenizer: Any, rows: list[dict[str, Any]]) -> list[CorpusRow]:
    encoder = RowEncoder(tokenizer, vocab_size=1024, max_length=None)
    return [encoder.encode(row, "x", "f", 1) for row in rows]


def write(kind: str, rows: list[Any], folder: Path) -> Path:
    import datasets

    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_bytes(b"\xef\xbb\xbf" + lines.replace(b"\n", b"\r\n") + b"\n")
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines))
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=2))
    elif kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        path = folder / "rows"
        datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


def load(path: Path | str, tokenizer: Any, **changes: Any) -> CorpusRows:
    return read_corpus(open_sources([path]), tokenizer, vocab_size=1024, **changes)


def content(rows: list[CorpusRow]) -> list[tuple[str, list[int], list[bool]]]:
    return [(row.id, row.input_ids.tolist(), row.loss_mask.tolist()) for row in rows]


@pytest.mark.parametrize("form", ["messages", "conversations", "input_ids"])
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "parquet", "saved"])
def test_every_format_and_form_gives_the_same_rows(tmp_path: Path, tokenizer: Any, kind: str, form: str) -> None:
    expected = content(read(tokenizer, rows_of("messages", tokenizer)))
    corpus = load(write(kind, rows_of(form, tokenizer), tmp_path), tokenizer)
    assert content(corpus.rows) == expected
    assert corpus.skips == []


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "parquet", "saved"])
def test_rows_of_mixed_forms_and_odd_rows_are_told_apart_by_number(tmp_path: Path, tokenizer: Any, kind: str) -> None:
    rows = [
        {"prompt": "why", "completion": "because it is", "messages": None},
        {"prompt": "why", "completion": "", "messages": None},
        {
            "prompt": None,
            "completion": None,
            "messages": CHAT,
        },
        {"prompt": None, "completion": None, "messages": []},
        {"prompt": None, "completion": None, "messages": None},
    ]
    corpus = load(write(kind, rows, tmp_path), tokenizer)
    assert [row.id for row in corpus.rows] == ["rows:1", "rows:3"]
    assert corpus.num_duplicates == 1
    name = {"saved": "rows"}.get(kind, f"rows.{kind}")
    assert corpus.skipped_places == {
        "empty reply": [f"{name}:2"], "no assistant reply": [f"{name}:4"], "no known fields": [f"{name}:5"],
    }  # fmt: skip
    with pytest.raises(CorpusError, match=f"{name}:2: empty reply"):
        load(tmp_path / name, tokenizer, strict=True)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "saved"])
def test_the_identity_is_that_of_the_content_and_the_order(tmp_path: Path, tokenizer: Any, kind: str) -> None:
    rows = rows_of("messages", tokenizer)
    files = []
    for name, chosen in (("a", rows), ("b", rows), ("c", rows[::-1])):
        (tmp_path / name).mkdir()
        files.append(open_sources([write(kind, chosen, tmp_path / name)])[0].file)
    assert files[0] == files[1] or kind == "jsonl.gz"  # gzip stores the time
    assert files[0].sha256 != files[2].sha256
    assert files[0].num_bytes > 0


def test_a_dataset_of_several_splits_asks_for_one(tmp_path: Path, tokenizer: Any) -> None:
    import datasets

    rows = datasets.Dataset.from_list(rows_of("messages", tokenizer))
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(tmp_path / "both")
    with pytest.raises(CorpusError, match=r"has 2 splits; give one of them: .*both/test or .*both/train"):
        open_sources([tmp_path / "both"])
    assert len(load(tmp_path / "both/train", tokenizer).rows) == 2
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "one")
    assert content(load(tmp_path / "one", tokenizer).rows) == content(load(tmp_path / "both/train", tokenizer).rows)


def test_damaged_files_are_one_line_that_names_them(tmp_path: Path, tokenizer: Any) -> None:
    rows = rows_of("messages", tokenizer)
    packed = write("jsonl.gz", rows * 1, tmp_path)
    packed.write_bytes(packed.read_bytes()[:-20])
    table = write("parquet", rows, tmp_path)
    table.write_bytes(table.read_bytes()[:-9])
    other = tmp_path / "other.parquet"
    write("parquet", [{"body": "x", "id": "a"}], tmp_path).rename(other)
    table.write_bytes(b"PAR1 and nothing else")
    saved = write("saved", rows, tmp_path)
    next(saved.glob("*.arrow")).write_bytes(b"not arrow")
    for path, message in (
        (packed, "not a whole gzip file"),
        (table, "cannot be read as Parquet, after row 0"),
        (other, "none of its columns is known"),
        (saved, "the dataset cannot be loaded"),
    ):
        with pytest.raises(CorpusError, match=message) as found:
            load(path, tokenizer)
        assert str(path) in str(found.value)
        assert "\n" not in str(found.value)


def test_a_line_beyond_all_measure_is_skipped_without_holding_it(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 1000)
    rows = rows_of("messages", tokenizer)
    lines = [json.dumps(rows[0]), json.dumps({"text": "x" * 5000}), json.dumps(rows[1])]
    data = "\n".join(lines).encode()
    for name, stored in (("a.jsonl", data), ("b.jsonl.gz", gzip.compress(data))):
        (tmp_path / name).write_bytes(stored)
        corpus = load(tmp_path / name, tokenizer)
        assert [row.line for row in corpus.rows] == [1, 3]
        assert corpus.skipped_places == {"the line is too long": [f"{name}:2"]}


def test_a_dataset_by_name_is_loaded_by_the_library(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.chdir(tmp_path)  # the library looks for a folder of that name before it asks the hub
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    rows = rows_of("messages", tokenizer)
    for split, part in (("train", rows), ("test", rows[:1])):
        write("jsonl", part, folder).rename(folder / f"{split}.jsonl")
    corpus = load("org/name:train", tokenizer)
    assert content(corpus.rows) == content(read(tokenizer, rows))
    assert corpus.files[0].name == "name"
    assert len(load("org/name:test", tokenizer).rows) == 1
    with pytest.raises(CorpusError, match=r"org/name:dev: there is no such file, and no such dataset") as found:
        open_sources(["org/name:dev"])
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    "name", ["nowhere.jsonl", "./org/name", "org/name/more", "org/rows.parquet", "name", "org/na me"]
)
def test_what_is_no_file_and_no_name_of_a_dataset_is_refused_without_asking_the_hub(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(sources, "_load_from_hub", lambda *_: pytest.fail("the hub was asked"))
    with pytest.raises(CorpusError, match="there is no such corpus file"):
        open_sources([name])


@pytest.mark.parametrize(
    ("entry", "parts"),
    [
        ("org/name", ("org/name", None, None)),
        ("org/na.me-2:train", ("org/na.me-2", None, "train")),
        ("org/name:main:test", ("org/name", "main", "test")),
    ],
)
def test_names_of_hub_datasets_may_say_configuration_and_split(entry: str, parts: tuple[str | None, ...]) -> None:
    found = sources.HUB_NAME.fullmatch(entry)
    assert found is not None
    assert (found["name"], found["config"], found["split"]) == parts


def test_repeated_rows_never_straddle_train_and_held_out(tmp_path: Path, tokenizer: Any) -> None:
    source = np.random.default_rng(0)
    texts = [" ".join(map(str, source.integers(0, 1000, 30))) for _ in range(60)]
    rows: list[dict[str, Any]] = [{"text": text} for text in texts]
    rows += [{"prompt": f"add {n}", "completion": text} for n, text in enumerate(texts)]
    corpus = load(write("jsonl", rows + rows[::-1], tmp_path), tokenizer)
    assert corpus.num_duplicates == len(rows)
    prompts = [row.input_ids[: row.num_prompt_tokens] for row in corpus.rows]
    hashes = np.asarray([int(hash_prompt(prompt), 16) for prompt in prompts], np.uint64)
    for share in (0.05, 0.3, 0.5):
        side = heldout_rows(hashes, share)
        assert (side[: len(rows)] == side[len(rows) :][::-1]).all()
        assert 0 < side[:60].sum() < 60  # texts without a prompt are not all on one side
        assert 0 < side[60:120].sum() < 60
