"""Assistant masks: content and end token of every assistant turn, never the header, never all zero."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_pipeline.errors import CorpusError
from dflash_pipeline.extract.chat import ChatEncoder, EncodedChat, RowProblem

TURN = "'<|im_start|>' + m['role'] + '\n'"
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ " + TURN + " + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_CONTENT_ONLY = MARKED.replace(
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}", "{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>' }}"
)
CLOSING = (  # ends every rendering that asks for no reply with the end of text, as Phi-3 does
    "{% for m in messages %}{{ " + TURN + " + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)
HEADERLESS = "{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"
PROMPT_IGNORED = "{% for m in messages %}{{ " + TURN + " + m['content'] + '<|im_end|>\n' }}{% endfor %}"
FORGETFUL = (  # renders only the last reply as the model wrote it, as reasoning models do
    "{% for m in messages %}{{ " + TURN + " }}{% if m['role'] == 'assistant' and not loop.last %}{{ '(short) ' }}"
    "{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (  # asks for a reply by opening a think tag unless told not to, as Qwen3.5 does
    "{% for m in messages %}{{ " + TURN + " }}{% if m['role'] == 'assistant' %}{{ '<think>\n</think>\n' }}"
    "{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n</think>\n' }}{% else %}{{ '<think> ' }}{% endif %}{% endif %}"
)
MULTI = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "second question"},
    {"role": "assistant", "content": "second answer"},
]
SINGLE = MULTI[1:3]


def masked(tokenizer: Any, encoded: EncodedChat) -> list[str]:
    """The text of each run of the mask."""
    runs: list[list[int]] = []
    for index, (token, mask) in enumerate(zip(encoded.ids, encoded.mask, strict=True)):
        if mask:
            if not index or not encoded.mask[index - 1]:
                runs.append([])
            runs[-1].append(token)
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def encode(tokenizer: Any, template: str | None, messages: list[dict[str, Any]]) -> EncodedChat:
    if template is not None:
        tokenizer.chat_template = template
    return ChatEncoder(tokenizer).encode(messages)


@pytest.mark.parametrize("template", [None, MARKED, MARKED_CONTENT_ONLY, CLOSING])
def test_every_reply_and_its_end_token_are_masked_and_nothing_else(tokenizer: Any, template: str | None) -> None:
    encoded = encode(tokenizer, template, MULTI)
    assert masked(tokenizer, encoded) == ["first answer<|im_end|>", "second answer<|im_end|>"]
    assert encoded.num_unmasked_turns == 0


@pytest.mark.parametrize("template", [None, MARKED, CLOSING])
def test_the_ids_are_those_of_the_whole_rendering(tokenizer: Any, template: str | None) -> None:
    encoded = encode(tokenizer, template, MULTI)
    assert encoded.ids == tokenizer.apply_chat_template(MULTI, tokenize=True, return_dict=True)["input_ids"]


@given(
    replies=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=12), min_size=1, max_size=3)
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_marker_and_prefixes_agree(tokenizer: Any, replies: list[str]) -> None:
    messages = [
        message
        for reply in replies
        for message in ({"role": "user", "content": "why"}, {"role": "assistant", "content": f"x{reply}"})
    ]
    tokenizer.chat_template = MARKED
    by_marker = ChatEncoder(tokenizer).encode(messages)
    tokenizer.chat_template = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    by_prefixes = ChatEncoder(tokenizer).encode(messages)
    assert by_marker == by_prefixes


def test_a_marker_that_marks_nothing_is_not_believed(tokenizer: Any) -> None:
    unreached = PROMPT_IGNORED + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    unreached += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    encoded = encode(tokenizer, unreached, SINGLE)
    assert masked(tokenizer, encoded) == ["first answer<|im_end|>"]


def test_a_template_without_a_reply_header_is_understood(tokenizer: Any) -> None:
    assert masked(tokenizer, encode(tokenizer, HEADERLESS, SINGLE)) == ["first answer<|im_end|>"]


def test_a_template_that_hides_where_a_reply_begins_is_refused(tokenizer: Any) -> None:
    with pytest.raises(RowProblem, match="does not show where the reply begins"):
        encode(tokenizer, PROMPT_IGNORED, SINGLE)


def test_an_earlier_reply_that_is_rewritten_is_context_only(tokenizer: Any) -> None:
    encoded = encode(tokenizer, FORGETFUL, MULTI)
    assert masked(tokenizer, encoded) == ["second answer<|im_end|>"]
    assert encoded.num_unmasked_turns == 1
    assert "(short) first answer" in tokenizer.decode(encoded.ids)


def test_an_opened_think_tag_is_no_obstacle(tokenizer: Any) -> None:
    assert masked(tokenizer, encode(tokenizer, THINKING, SINGLE)) == ["first answer<|im_end|>"]


def test_a_reply_that_melts_into_its_header_is_refused_not_shifted(tokenizer: Any) -> None:
    first, second = min(
        token for token in tokenizer.get_vocab() if len(token) == 2 and token.isascii() and token.isalpha()
    )
    glued = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '" + first + "' + m['content'] }}"
        "{% else %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '" + first + "' }}{% endif %}"
    )
    with pytest.raises(RowProblem, match="does not show"):
        encode(tokenizer, glued, [{"role": "user", "content": "a"}, {"role": "assistant", "content": second}])


def test_a_template_that_fails_is_a_problem_of_the_row(tokenizer: Any) -> None:
    strict = (
        "{% for m in messages %}{{ raise_exception('no calls\nplease') if m.tool_calls else m.content }}{% endfor %}"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(RowProblem, match="the chat template cannot render it") as caught:
        encode(tokenizer, strict, [{"role": "user", "content": "call f"}, call])
    assert caught.value.detail
    assert "\n" not in caught.value.detail


def test_tool_calls_and_tool_turns_are_rendered_where_the_template_can(tokenizer: Any) -> None:
    able = (
        "{% if tools %}{{ '<|im_start|>tools' + tools | string + '<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}{{ " + TURN + " }}{% if m['content'] %}{{ m['content'] }}{% endif %}"
        "{% for call in m['tool_calls'] or [] %}{{ '<call>' + call['function']['name'] }}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    messages = [
        {"role": "system", "content": "use tools"},
        {"role": "user", "content": "call f"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "it is 42"},
    ]
    tokenizer.chat_template = able
    encoded = ChatEncoder(tokenizer).encode(messages, [{"name": "f"}])
    assert masked(tokenizer, encoded) == ["<call>f<|im_end|>", "it is 42<|im_end|>"]


def test_no_second_start_token_is_added(tokenizer: Any) -> None:
    tokenizer.bos_token = "<|endoftext|>"
    encoded = encode(tokenizer, "{{ bos_token }}" + CLOSING.replace("{% else %}{{ '<|endoftext|>' }}", ""), SINGLE)
    assert encoded.ids.count(tokenizer.bos_token_id) == 1


def test_without_a_template_there_is_a_clear_error(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(CorpusError, match=r"no chat template.*prompt_ids and completion_ids"):
        ChatEncoder(tokenizer)


def test_broken_unicode_is_a_problem_of_the_row(tokenizer: Any) -> None:
    with pytest.raises(RowProblem, match="not valid Unicode"):
        encode(tokenizer, None, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\ud800 b"}])
