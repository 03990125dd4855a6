"""Corpus files: every row is usable or skipped with its line; the same rows from every form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.errors import CorpusError
from dflash_pipeline.extract.corpus import CorpusRows, read_corpus
from dflash_pipeline.extract.sources import open_sources

USER, REPLY = {"role": "user", "content": "why"}, {"role": "assistant", "content": "because it is"}
GOOD: dict[str, Any] = {"messages": [USER, REPLY]}
CALL = {"role": "assistant", "content": None}
IDS: dict[str, Any] = {"prompt_ids": [5, 6, 7], "completion_ids": [8, 9, 10, 2]}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(paths: Path | list[Path], tokenizer: Any, **changes: Any) -> CorpusRows:
    files = paths if isinstance(paths, list) else [paths]
    return read_corpus(open_sources(files), tokenizer, **{"vocab_size": 1024, **changes})


def content(rows: CorpusRows) -> list[tuple[list[int], list[bool], int]]:
    return [(row.input_ids.tolist(), row.loss_mask.tolist(), row.num_prompt_tokens) for row in rows.rows]


def test_the_three_forms_give_the_same_rows(tmp_path: Path, tokenizer: Any) -> None:
    messages = read(write(tmp_path / "m.jsonl", GOOD), tokenizer)
    text = read(write(tmp_path / "t.jsonl", {"prompt": "why", "completion": "because it is"}), tokenizer)
    ids, _, num_prompt = content(messages)[0]
    as_ids = {"prompt_ids": ids[:num_prompt], "completion_ids": ids[num_prompt:]}
    ready = read(write(tmp_path / "i.jsonl", as_ids), tokenizer)
    assert content(messages) == content(text) == content(ready)
    assert tokenizer.decode(ids[num_prompt:]) == "because it is<|im_end|>"
    assert messages.rows[0].input_ids.dtype == np.int32
    assert messages.rows[0].loss_mask.dtype == np.bool_


def test_ids_win_over_messages_and_messages_over_text(tmp_path: Path, tokenizer: Any) -> None:
    text = {"prompt": "other", "completion": "something else entirely"}
    assert content(read(write(tmp_path / "a.jsonl", {**text, **GOOD, **IDS}), tokenizer)) == [
        ([5, 6, 7, 8, 9, 10, 2], [False] * 3 + [True] * 4, 3)
    ]
    both = content(read(write(tmp_path / "b.jsonl", {**text, **GOOD}), tokenizer))
    assert both == content(read(write(tmp_path / "c.jsonl", GOOD), tokenizer))


def test_ids_need_no_chat_template(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = None
    assert len(read(write(tmp_path / "a.jsonl", IDS), tokenizer).rows) == 1
    with pytest.raises(CorpusError, match="no chat template"):
        read(write(tmp_path / "b.jsonl", GOOD), tokenizer)


def test_mark_carriage_returns_and_blank_lines_change_nothing(tmp_path: Path, tokenizer: Any) -> None:
    rows = [GOOD, IDS, {"prompt": "two\nlines", "completion": "a\r\nb and more"}]
    clean = write(tmp_path / "rows.jsonl", *rows)
    dirty = tmp_path / "dirty" / "rows.jsonl"
    dirty.parent.mkdir()
    dirty.write_bytes(b"\xef\xbb\xbf" + clean.read_bytes().replace(b"\n", b"\r\n") + b"\r\n  \r\n\n")
    no_newline = tmp_path / "open.jsonl"
    no_newline.write_bytes(clean.read_bytes().rstrip(b"\n"))
    expected = read(clean, tokenizer)
    assert content(read(dirty, tokenizer)) == content(expected)
    assert [row.id for row in read(dirty, tokenizer).rows] == [row.id for row in expected.rows]
    assert content(read(no_newline, tokenizer)) == content(expected)


def test_multi_turn_rows_have_one_run_per_reply(tmp_path: Path, tokenizer: Any) -> None:
    turns = GOOD["messages"] * 2 + [{"role": "user", "content": "never answered"}]
    row = read(write(tmp_path / "a.jsonl", {"messages": turns}), tokenizer).rows[0]
    mask = row.loss_mask.astype(int)
    assert int((np.diff(np.concatenate([[0], mask])) == 1).sum()) == 2
    assert mask[-1] == 1
    assert row.num_prompt_tokens == int(np.argmax(mask))
    assert row.num_anchors == int((mask[:-1] * mask[1:]).sum())
    assert "never" not in tokenizer.decode(row.input_ids)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ([], "not a JSON object"),
        (None, "not a JSON object"),
        ("text", "not a JSON object"),
        ({}, "no known fields"),
        ({"body": "plain"}, "no known fields"),
        ({"messages": None, "text": None}, "no known fields"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "image"}]}]}, "content has parts that are not"),
        ({"text": " "}, "empty text"),
        ({"text": ["plain"]}, "text is not text"),
        ({"input_ids": []}, "empty text"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}, "loss_mask is not a list of 0 and 1"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 2, 1]}, "loss_mask is not a list of 0 and 1"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}, "reply too short"),
        ({"loss_mask": [0, 1]}, "loss_mask without input_ids"),
        ({"conversations": "hello"}, "messages is not a list"),
        (
            {"conversations": [{"from": "human", "value": "x"}, {"from": "narrator", "value": "y"}]},
            "an unknown speaker",
        ),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, "the assistant speaks first"),
        ({"conversations": [{"from": "human", "value": "x"}, {"from": "gpt"}]}, "empty reply"),
        ({"messages": [USER, {**CALL, "tool_calls": "f"}]}, "tool_calls is not a list"),
        ({"messages": [USER, {**CALL, "tool_calls": ["f"]}]}, "a tool call is no object"),
        ({"messages": [USER, {**CALL, "tool_calls": [{}]}]}, "a tool call without a function's name"),
        (
            {"messages": [USER, {**CALL, "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "a tool call is not JSON",
        ),
        (
            {"messages": [USER, {**CALL, "tool_calls": [{"name": "f", "arguments": "5"}]}]},
            "a tool call's arguments are no object",
        ),
        ({"messages": []}, "no assistant reply"),
        ({"messages": {"role": "user"}}, "messages is not a list"),
        ({"messages": ["hello"]}, "a message without a role"),
        ({"messages": [{"content": "x"}]}, "a message without a role"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no assistant reply"),
        ({"messages": [REPLY]}, "the assistant speaks first"),
        ({"messages": [{"role": "system", "content": "x"}, REPLY]}, "the assistant speaks first"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "empty reply"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "empty reply"),
        (
            {"messages": [USER, {"role": "assistant", "content": 5}]},
            "the chat template cannot render it",
        ),
        ({"messages": [{"role": "user"}, REPLY]}, "a message without content"),
        ({"messages": [{"role": "user", "content": None}, REPLY]}, "a message without content"),
        ({"prompt": "why"}, "no completion"),
        ({"completion": "why"}, "no prompt"),
        ({"prompt": "why", "completion": " \n"}, "empty reply"),
        ({"prompt": ["why"], "completion": "x"}, "prompt is not text"),
        ({"prompt_ids": [1]}, "prompt_ids without completion_ids"),
        ({"completion_ids": [1, 2]}, "completion_ids without prompt_ids"),
        ({"prompt_ids": [], "completion_ids": [1, 2]}, "empty prompt"),
        ({"prompt_ids": [1], "completion_ids": []}, "empty reply"),
        ({"prompt_ids": [1], "completion_ids": [2]}, "reply too short"),
        ({"prompt_ids": [1.0], "completion_ids": [2, 3]}, "prompt_ids is not a list of whole numbers"),
        ({"prompt_ids": [1], "completion_ids": [True, 3]}, "completion_ids is not a list of whole numbers"),
        ({"prompt_ids": [1], "completion_ids": "23"}, "completion_ids is not a list of whole numbers"),
        ({**GOOD, "id": 1.5}, "id is neither text nor a whole number"),
        ({**GOOD, "tools": "f"}, "tools is not a list"),
    ],
)
def test_an_unusable_row_is_skipped_with_its_line(tmp_path: Path, tokenizer: Any, bad: Any, reason: str) -> None:
    path = write(tmp_path / "rows.jsonl", GOOD, bad, IDS)
    found = read(path, tokenizer)
    assert len(found.rows) == 2
    (said,) = found.skipped
    assert found.skipped == {said: 1}
    assert found.skipped_places == {said: ["rows.jsonl:2"]}
    assert said.startswith(reason)
    assert [(skip.file, skip.line) for skip in found.skips] == [("rows.jsonl", 2)]
    assert found.notices() == [line for line in found.notices() if "rows.jsonl:2" in line and "\n" not in line]
    with pytest.raises(CorpusError, match=f"rows.jsonl:2: {reason}"):
        read(path, tokenizer, strict=True)


def test_bytes_that_are_no_utf8_or_no_json_are_skipped_with_their_line(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps(GOOD).encode() + b"\n"
    deep = b"[" * 100_000 + b"\n"
    path.write_bytes(good + b'{"prompt": "\xff"}\n' + good + b"{broken\n" + deep + good[:-9])
    found = read(path, tokenizer)
    assert len(found.rows) == 2
    assert [(skip.line, skip.reason) for skip in found.skips] == [
        (2, "not UTF-8"),
        (4, "not JSON"),
        (5, "not JSON"),
        (6, "not JSON"),
    ]
    assert "0xff" in found.skips[0].detail


def test_replies_of_few_tokens_are_used_or_counted(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt_ids": [3, 4], "completion_ids": list(range(10, 10 + length))} for length in (1, 2, 7, 8, 9)]
    found = read(write(tmp_path / "a.jsonl", *rows), tokenizer)
    assert [row.num_tokens for row in found.rows] == [4, 9, 10, 11]
    assert [row.num_anchors for row in found.rows] == [1, 6, 7, 8]
    assert found.skipped == {"reply too short": 1}


def test_files_that_cannot_be_a_corpus_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "blank.jsonl").write_bytes(b"\n \r\n")
    (tmp_path / "rows.jsonl.gz").write_bytes(b"x")
    (tmp_path / "rows.csv").write_bytes(b"x")
    write(tmp_path / "bad.jsonl", [], {})
    good = write(tmp_path / "good.jsonl", GOOD)
    for name, message in (
        ("empty.jsonl", "the file is empty"),
        ("blank.jsonl", "there are no rows in it"),
        ("rows.jsonl.gz", "not a whole gzip file, after line 0"),
        ("rows.csv", "csv files are not read"),
        ("nowhere.jsonl", "no such corpus file"),
        (".", "no dataset written by save_to_disk"),
        ("bad.jsonl", "no usable row: none of 2 rows is usable; skipped 1 row: not a JSON object"),
    ):
        with pytest.raises(CorpusError, match=message) as caught:
            read([tmp_path / name], tokenizer)
        assert "\n" not in str(caught.value)
    with pytest.raises(CorpusError, match="given twice"):
        read([good, tmp_path / "." / "good.jsonl"], tokenizer)
    with pytest.raises(CorpusError, match="the file is empty"):
        read([good, tmp_path / "empty.jsonl"], tokenizer)
    with pytest.raises(CorpusError, match="no corpus file"):
        read([], tokenizer)


@pytest.mark.parametrize("token_id", [1024, -1, 10**12])
def test_a_row_with_ids_outside_the_vocabulary_is_skipped(tmp_path: Path, tokenizer: Any, token_id: int) -> None:
    bad = {"prompt_ids": [1, token_id], "completion_ids": [2, 3]}
    path = write(tmp_path / "a.jsonl", GOOD, bad, IDS)
    found = read(path, tokenizer)
    assert len(found.rows) == 2
    assert found.skipped_places == {"token id outside the vocabulary": ["a.jsonl:2"]}
    assert any(f"(id {token_id}, the target has 0 to 1023" in line for line in found.notices())
    with pytest.raises(CorpusError, match=f"a.jsonl:2: token id outside the vocabulary .*id {token_id}.*--strict"):
        read(path, tokenizer, strict=True)
    with pytest.raises(
        CorpusError, match=f"no usable row: none of 1 row is usable; .*id {token_id}, the target has 0 to 1023"
    ):
        read(write(tmp_path / "b.jsonl", bad), tokenizer)


def test_ids_beyond_the_tokenizer_but_inside_the_embeddings_are_accepted(tmp_path: Path, tokenizer: Any) -> None:
    assert len(read(write(tmp_path / "a.jsonl", {"prompt_ids": [1023], "completion_ids": [2, 3]}), tokenizer).rows) == 1


def test_rows_are_named_by_their_id_or_by_file_and_line(tmp_path: Path, tokenizer: Any) -> None:
    first = write(tmp_path / "rows.jsonl", {**GOOD, "id": "a"}, GOOD, {**GOOD, "id": 7}, {**GOOD, "id": None})
    (tmp_path / "more").mkdir()
    second = write(tmp_path / "more" / "rows.jsonl", GOOD)
    found = read([first, second], tokenizer)
    assert [row.id for row in found.rows] == ["a", "rows:2", "7", "rows:4", "rows-2:1"]


def test_a_row_with_the_id_of_an_earlier_one_is_skipped_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    """The first row stays; one that says the same is told apart from one that says something else, which is lost."""
    first = write(tmp_path / "a.jsonl", {**GOOD, "id": "x"}, GOOD, {**GOOD, "id": "x"})
    second = write(tmp_path / "b.jsonl", {"messages": "unusable", "id": "y"}, {**IDS, "id": "x"}, {**IDS, "id": "y"})
    found = read([first, second], tokenizer)
    assert [(row.id, row.file, row.line) for row in found.rows] == [
        ("x", "a.jsonl", 1),
        ("a:2", "a.jsonl", 2),
        ("y", "b.jsonl", 3),
    ]
    same, other = "the id of an earlier row", "the id of an earlier row, other content"
    assert found.skipped == {same: 1, "messages is not a list": 1, other: 1}
    assert found.skipped_places[same] == ["a.jsonl:3"]
    assert found.skipped_places[other] == ["b.jsonl:2"]
    assert found.num_duplicates == 1  # a:2 says what x says; skipped rows are no duplicates
    assert any("other content ('x' is at a.jsonl:1; " in line for line in found.notices())
    with pytest.raises(CorpusError, match=r"a.jsonl:3: the id of an earlier row \('x' is at a.jsonl:1"):
        read([first, second], tokenizer, strict=True)


def test_limits_count_no_row_that_is_skipped_for_its_id(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{**IDS, "id": name} for name in ("a", "a", "a", "b", "c")]
    found = read(write(tmp_path / "a.jsonl", *rows), tokenizer, limit_tokens=14)
    assert ([row.id for row in found.rows], found.skipped) == (["a", "b"], {"the id of an earlier row": 2})


def test_long_rows_are_cut_where_something_of_the_reply_remains(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt_ids": [1] * prompt, "completion_ids": [9] * 6} for prompt in (4, 8, 9, 20)]
    found = read(write(tmp_path / "a.jsonl", *rows), tokenizer, max_length=10)
    assert [(row.num_tokens, row.num_anchors, row.truncated) for row in found.rows] == [(10, 5, False), (10, 1, True)]
    assert found.skipped == {"too long": 2}
    assert "cut 1 row at the length limit" in found.notices()


def test_limits_stop_at_the_limit(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", [], *([IDS] * 5))
    assert [row.line for row in read(path, tokenizer, limit_rows=2).rows] == [2, 3]
    assert read(path, tokenizer, limit_tokens=20).num_tokens == 14
    assert read(path, tokenizer, limit_tokens=21).num_tokens == 21
    assert len(read(path, tokenizer, limit_rows=99).rows) == 5
    with pytest.raises(CorpusError, match="the first row has 7 tokens, over the limit of 3"):
        read(path, tokenizer, limit_tokens=3)


def test_the_files_are_recorded_with_their_content(tmp_path: Path, tokenizer: Any) -> None:
    import hashlib

    path = write(tmp_path / "a.jsonl", GOOD)
    file = read(path, tokenizer).files[0]
    data = path.read_bytes()
    assert (file.name, file.sha256, file.num_bytes) == ("a.jsonl", hashlib.sha256(data).hexdigest(), len(data))


def test_repeated_rows_are_counted_whatever_form_they_come_in(tmp_path: Path, tokenizer: Any) -> None:
    text = {"prompt": "why", "completion": "because it is"}
    found = read(write(tmp_path / "a.jsonl", GOOD, IDS, text, {**GOOD, "id": "again"}, {**IDS, "id": 5}), tokenizer)
    assert len(found.rows) == 5
    assert found.num_duplicates == 3
    assert any("3 rows repeat an earlier row" in line for line in found.notices())
    other = read(write(tmp_path / "b.jsonl", {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}, IDS), tokenizer)
    assert other.num_duplicates == 0


def test_text_is_learned_from_but_for_its_first_tokens(tmp_path: Path, tokenizer: Any) -> None:
    text = "def unite(left, right): return left + right  # and many more words that a tokenizer takes apart"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = read(write(tmp_path / "a.jsonl", {"text": text}, {"input_ids": ids}, {"text": "a b c d"}), tokenizer)
    assert content(found)[0] == (ids, [False] * 16 + [True] * (len(ids) - 16), 16)
    assert content(found)[1] == content(found)[0]
    short = found.rows[2]
    assert (short.num_prompt_tokens, short.num_tokens) == (
        short.num_tokens // 2,
        len(tokenizer("a b c d")["input_ids"]),
    )


def test_text_has_one_beginning(tmp_path: Path, tokenizer: Any) -> None:
    from tokenizers import processors

    tokenizer.add_special_tokens({"bos_token": "<|endoftext|>"})
    start = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", start)]
    )
    path = write(tmp_path / "a.jsonl", {"text": "one two three"}, {"text": "<|endoftext|>one two three"})
    first, second = content(read(path, tokenizer))
    assert first[0][0] == start
    assert start not in first[0][1:]
    assert first == second


def test_ids_with_a_mask_are_taken_as_they_are(tmp_path: Path, tokenizer: Any) -> None:
    row = {"input_ids": [5, 6, 7, 8, 9, 10], "loss_mask": [0, 0, 1, 1, 0, 0]}
    learned = {"input_ids": [5, 6, 7, 8], "loss_mask": [True] * 4}
    assert content(read(write(tmp_path / "a.jsonl", row, learned), tokenizer)) == [
        ([5, 6, 7, 8], [False, False, True, True], 2),
        ([5, 6, 7, 8], [False, False, True, True], 2),
    ]


def test_a_reason_says_what_to_mend(tmp_path: Path, tokenizer: Any) -> None:
    found = read(write(tmp_path / "a.jsonl", GOOD, {"id": 1, "messages": None, "text": None}, [GOOD]), tokenizer)
    assert found.notices() == [
        "skipped 1 row: no known fields (messages, text: null): a.jsonl:2",
        "skipped 1 row: not a JSON object (found list; the file of a JSON array is to be named .json): a.jsonl:3",
    ]
