"""Prompts files: three forms, all odd lines counted, ids by the chat template."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from dflash_pipeline.errors import CorpusError
from dflash_pipeline.target.prompts import Prompts, read_prompts


def read(path: Path, lines: list[object], tokenizer: object = None, **options: int) -> Prompts:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text, encoding="utf-8")
    return read_prompts(path, tokenizer, vocab_size=1024, **options)


def test_text_and_messages_are_rendered_as_the_template_asks_for_a_reply(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    turn = {"role": "user", "content": "def add"}
    lines: list[object] = [
        {"prompt": "def add", "completion": "ignored", "source": "humaneval", "id": 7},
        {"messages": [turn, {"role": "assistant", "content": "left off"}]},
        {"prompt_ids": [1, 2, 3], "prompt": "ids win"},
    ]
    prompts = read(tmp_path / "p.jsonl", lines, tokenizer).prompts
    expected = tokenizer("<|im_start|>user\ndef add<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    assert [prompt.ids for prompt in prompts] == [expected, expected, [1, 2, 3]]
    assert [(prompt.id, prompt.source) for prompt in prompts] == [
        ("7", "humaneval"),
        ("p:2", "prompts"),
        ("p:3", "prompts"),
    ]


def test_what_cannot_be_used_is_counted_by_reason_and_line(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    lines: list[object] = [
        "\ufeff{}",
        "",
        {"prompt_ids": [5]},
        {"prompt_ids": []},
        {"prompt_ids": [True]},
        {"prompt": "  "},
        "nonsense",
        [1],
        {"prompt_ids": [1], "id": 1.5},
        {"prompt_ids": [1], "source": 3},
        {"prompt_ids": [1] * 9},
    ]
    found = read(tmp_path / "p.jsonl", lines, max_tokens=8)
    assert [prompt.ids for prompt in found.prompts] == [[5]]
    assert found.skipped_lines == {
        "no prompt, no messages and no prompt_ids": [1, 6],
        "empty prompt": [4],
        "prompt_ids is not a list of whole numbers": [5],
        "not JSON": [7],
        "not a JSON object": [8],
        "id is neither text nor a whole number": [9],
        "source is not text": [10],
        "longer than 8 tokens": [11],
    }
    assert any("p.jsonl:1, 6" in line for line in found.notices(tmp_path / "p.jsonl"))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"prompt_ids": [1024]}], "outside the target's vocabulary of 1024"),
        ([{"prompt_ids": [1], "id": "a"}, {"prompt_ids": [2], "id": "a"}], "used twice, at .*:1 and at .*:2"),
        ([{"prompt": "text"}], "has no chat template"),
        ([{"prompt_ids": []}], "no usable prompt; skipped 1 prompt: empty prompt"),
    ],
)
def test_a_file_that_is_not_for_this_target_is_refused(tmp_path: Path, lines: list[object], message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        read(tmp_path / "p.jsonl", lines, tokenizer=SimpleNamespace(chat_template=None))


def test_a_limit_counts_usable_prompts(tmp_path: Path) -> None:
    found = read(tmp_path / "p.jsonl", [{"prompt_ids": []}, *({"prompt_ids": [n]} for n in range(1, 9))], limit=2)
    assert [prompt.ids for prompt in found.prompts] == [[1], [2]]
    with pytest.raises(CorpusError, match="no such prompts file"):
        read_prompts(tmp_path / "none.jsonl", None, vocab_size=9)
