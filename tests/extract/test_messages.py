"""Conversations as people write them: speakers, tool calls, missing content."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash_pipeline.extract.chat import RowProblem
from dflash_pipeline.extract.messages import check_messages, from_conversations
from dflash_pipeline.extract.rows import CorpusRow, RowEncoder

TOOLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + c.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Łódź", "days": 2}}}
ROW = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "how is the weather"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sky": "grey"}'},
    {"role": "assistant", "content": "it is grey there"},
]


def encode(tokenizer: Any, template: str | None, messages: object) -> CorpusRow:
    if template is not None:
        tokenizer.chat_template = template
    return RowEncoder(tokenizer, vocab_size=1024, max_length=None).encode({"messages": messages}, "x", "f", 1)


def text(tokenizer: Any, row: CorpusRow) -> str:
    return str(tokenizer.decode(row.input_ids))


def test_a_conversation_with_tools_is_rendered_whole_and_only_the_assistant_is_learned(tokenizer: Any) -> None:
    row = encode(tokenizer, TOOLS, ROW)
    whole = text(tokenizer, row)
    assert '<call>weather{"city": "Łódź", "days": 2}' in whole
    assert '"sky": "grey"' in whole
    learned = tokenizer.decode(row.input_ids[row.loss_mask])
    assert learned == '<call>weather{"city": "Łódź", "days": 2}<|im_end|>it is grey there<|im_end|>'


@pytest.mark.parametrize("form", ["json text", "null filled", "content missing", "no outer layer needed"])
def test_a_call_is_the_same_however_it_was_stored(tokenizer: Any, form: str) -> None:
    expected = encode(tokenizer, TOOLS, ROW).input_ids.tolist()
    rows = json.loads(json.dumps(ROW))
    call = rows[2]["tool_calls"][0]
    if form == "json text":
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    if form == "null filled":  # as columns of a table store it
        rows = [{"tool_calls": None, "name": None, **message} for message in rows]
    if form == "content missing":
        del rows[2]["content"]
    if form == "no outer layer needed":
        rows[2]["tool_calls"] = [call["function"]]
        template = TOOLS.replace("c.function.", "c.")
        assert encode(tokenizer, template, rows).input_ids.tolist() == expected
        return
    assert encode(tokenizer, TOOLS, rows).input_ids.tolist() == expected


def test_a_template_that_leaves_out_calls_or_results_makes_the_row_unusable(tokenizer: Any) -> None:
    with pytest.raises(RowProblem, match="leaves out tool calls"):
        encode(tokenizer, None, ROW)  # plain ChatML would teach an empty reply in place of the call
    without_results = TOOLS.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
    with pytest.raises(RowProblem, match="leaves out the results of tools"):
        encode(tokenizer, without_results, ROW)


@pytest.mark.parametrize(
    "content",
    ["{{ m.content }}", "{{ '' ~ m.content }}", "{{ '' + m.content }}", "{% if m.content %}{{ m.content }}{% endif %}"],
)
def test_missing_content_is_never_the_word_none(tokenizer: Any, content: str) -> None:
    row = encode(tokenizer, TOOLS.replace("{% if m.content %}{{ m.content }}{% endif %}", content), ROW)
    assert "None" not in text(tokenizer, row)
    assert row.input_ids.tolist() == encode(tokenizer, TOOLS, ROW).input_ids.tolist()


def test_a_template_that_asks_whether_there_is_content_is_told(tokenizer: Any) -> None:
    asks = TOOLS.replace("{% for c in", "{% if m.content is not string %}{{ 'calls:' }}{% endif %}{% for c in")
    assert "calls:<call>weather" in text(tokenizer, encode(tokenizer, asks, ROW))


def test_speakers_have_the_names_people_give_them(tokenizer: Any) -> None:
    turns = [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "how is the weather"},
        {"from": "function_call", "value": json.dumps(CALL["function"])},
        {"from": "observation", "value": '{"sky": "grey"}'},
        {"from": "gpt", "value": "it is grey there"},
    ]
    assert check_messages(from_conversations(turns)) == check_messages(ROW)
    assert from_conversations(ROW) == ROW
    tokenizer.chat_template = TOOLS
    encoder = RowEncoder(tokenizer, vocab_size=1024, max_length=None)
    rows = [encoder.encode({key: value}, "x", "f", 1) for key, value in (("conversations", turns), ("messages", ROW))]
    assert rows[0].input_ids.tolist() == rows[1].input_ids.tolist()
    assert rows[0].loss_mask.tolist() == rows[1].loss_mask.tolist()


def test_the_rows_own_values_are_not_changed() -> None:
    before = json.dumps(ROW)
    check_messages(ROW)
    assert json.dumps(ROW) == before


@pytest.mark.parametrize(
    "content",
    [
        "m.content",  # writes a list with its brackets
        "(m.content + '')",  # fails on a list
        "(m.content if m.content is string else '')",  # leaves a list out
        "(m.content if m.content is string else m.content | map(attribute='text') | join)",
    ],
)
def test_text_in_parts_is_the_text(tokenizer: Any, content: str) -> None:
    template = TOOLS.replace("{{ m.content }}", f"{{{{ {content} }}}}")
    parts = [{"type": "text", "text": "it is "}, {"type": "text", "text": "grey there"}]
    row = encode(tokenizer, template, [ROW[1], {"role": "assistant", "content": parts}])
    assert row.input_ids.tolist() == encode(tokenizer, template, [ROW[1], ROW[4]]).input_ids.tolist()


def test_a_template_that_knows_parts_alone_is_given_parts(tokenizer: Any) -> None:
    parts_alone = TOOLS.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
    rows = [
        {"role": role, "content": [{"type": "text", "text": said}]}
        for role, said in [("user", "why"), ("assistant", "it is grey")]
    ]
    assert "it is grey" in text(tokenizer, encode(tokenizer, parts_alone, rows))
