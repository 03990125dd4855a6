"""From a conversation to token ids and the mask of what the assistant wrote.

The mask covers every assistant turn: its content and the token that ends it, not the header before it. It comes from
the template's generation marker where there is one, else from rendering prefixes of the conversation, each verified
to be a prefix of the whole. A mask is never guessed and never all zero.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CorpusError, message_line

MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Ways to ask for the header of a reply. Reasoning templates open a think tag unless told not to; the first whose tokens
# are a prefix of the conversation's counts.
HEADER_OPTIONS: tuple[dict[str, object], ...] = ({}, {"enable_thinking": False})

OTHER = "another_name"

Message = dict[str, Any]


class RowProblem(Exception):
    """A row cannot be used. `reason` is a short text that rows are counted by, `detail` says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class EncodedChat:
    """Token ids and the mask of assistant tokens, of equal length.

    `num_unmasked_turns` counts earlier assistant turns that the template rewrites once later turns follow (it drops
    their reasoning, for example): their tokens are not what the model wrote, so they are context only.
    """

    ids: list[int]
    mask: list[bool]
    num_unmasked_turns: int = 0


class ChatEncoder:
    """Renders conversations with a tokenizer's chat template.

    Raises:
        CorpusError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise CorpusError(
                "the target's tokenizer has no chat template, so messages and prompt/completion text cannot be "
                "rendered: give rows with prompt_ids and completion_ids, or a target with a template"
            )
        self.tokenizer = tokenizer
        self.special_ids = _special_ids(tokenizer)

    def encode(self, messages: list[Message], tools: list[Any] | None = None) -> EncodedChat:
        """Return ids and mask of a conversation that ends with an assistant turn.

        Costs one tokenisation with a marker, else one more per assistant turn and another per earlier one.

        Raises:
            RowProblem: the template cannot render it, leaves out a tool call or a tool's result, or does not show where
                a reply begins.
        """
        messages = self._settle_missing_content(self._settle_text_parts(messages, tools), tools)
        self._check_tools_are_rendered(messages, tools)
        if self._has_marker(tools):
            encoded = self._encode_by_marker(messages, tools)
            if any(encoded.mask):
                return encoded
        return self._encode_by_prefixes(messages, tools)

    def _has_marker(self, tools: list[Any] | None) -> bool:
        try:
            template = self.tokenizer.get_chat_template(tools=tools)
        except ValueError as error:  # several templates and none named default
            raise CorpusError(f"the target's tokenizer has no default chat template: {error}") from error
        return bool(getattr(self.tokenizer, "is_fast", False)) and MARKER.search(template) is not None

    def _encode_by_marker(self, messages: list[Message], tools: list[Any] | None) -> EncodedChat:
        try:
            output = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception as error:
            raise _template_problem(error) from error
        ids, mask = [int(i) for i in output["input_ids"]], [bool(m) for m in output["assistant_masks"]]
        for index in range(1, len(ids)):  # a marker around the content alone leaves the end token out
            ends = mask[index - 1] and not mask[index] and ids[index - 1] not in self.special_ids
            if ends and ids[index] in self.special_ids and ids[index] != self.tokenizer.bos_token_id:
                mask[index] = True
        return EncodedChat(ids, mask)

    def _encode_by_prefixes(self, messages: list[Message], tools: list[Any] | None) -> EncodedChat:
        ids = self._tokenize(self._render(messages, tools))
        mask = [False] * len(ids)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        num_unmasked = 0
        for turn in turns:
            start = self._turn_start(messages, turn, tools, ids)
            end = self._turn_end(messages, turn, tools, ids, start)
            if start is None or end is None:
                num_unmasked += 1
                continue
            mask[start:end] = [True] * (end - start)
        if num_unmasked == len(turns):
            raise RowProblem(
                "the template does not show where the reply begins",
                "no rendering of the turns before the reply is a prefix of the whole; add a generation marker to the "
                "template, or give prompt_ids and completion_ids",
            )
        return EncodedChat(ids, mask, num_unmasked)

    def _settle_missing_content(self, messages: list[Message], tools: list[Any] | None) -> list[Message]:
        """Give turns without content the empty text where the template fails on None, or prints its name.

        Newer releases of transformers leave null content out before the template sees it, older ones do not.
        """
        bare = [message.get("content", "") is None for message in messages]
        if not any(bare):
            return messages
        empty, named = (
            [{**message, "content": text} if gap else message for message, gap in zip(messages, bare, strict=True)]
            for text in ("", "None")
        )
        try:
            return empty if self._render(messages, tools) == self._render(named, tools) else messages
        except RowProblem:
            return empty

    def _settle_text_parts(self, messages: list[Message], tools: list[Any] | None) -> list[Message]:
        """Join content that is text in parts, [{"type": "text", "text"}], where the template writes text out.

        Most templates know text alone: they fail on a list, or write its brackets. Those that know parts alone leave
        text out, and keep the parts.
        """
        texts = [_joined_parts(message.get("content")) for message in messages]
        if all(text is None for text in texts):
            return messages
        pairs = list(zip(messages, texts, strict=True))
        joined, changed = (
            [message if text is None else {**message, "content": write(text)} for message, text in pairs]
            for write in (str, lambda _: OTHER)
        )
        try:
            return joined if self._render(joined, tools) != self._render(changed, tools) else messages
        except RowProblem:
            return messages

    def _check_tools_are_rendered(self, messages: list[Message], tools: list[Any] | None) -> None:
        """Refuse a row of which the template drops what was called or what came back: a change there must show."""
        whole: str | None = None
        for index, message in enumerate(messages):
            changed = _with_another_call_or_result(message)
            if changed is None:
                continue
            whole = self._render(messages, tools) if whole is None else whole
            if self._render([*messages[:index], changed, *messages[index + 1 :]], tools) == whole:
                what = "tool calls" if message["role"] == "assistant" else "the results of tools"
                raise RowProblem(f"the chat template leaves out {what}", f"message {index + 1}")

    def _turn_start(self, messages: list[Message], turn: int, tools: list[Any] | None, ids: list[int]) -> int | None:
        for options in HEADER_OPTIONS:
            try:
                bare = self._render(messages[:turn], tools, **options)
                text = self._render(messages[:turn], tools, add_generation_prompt=True, **options)
            except RowProblem:
                continue
            prefix = self._tokenize(text)
            if prefix != ids[: len(prefix)]:
                continue
            if text != bare or self._begins_with_content(ids[len(prefix) :], messages[turn]):
                return len(prefix)
        return None

    def _begins_with_content(self, ids: list[int], message: Message) -> bool:
        """Whether a template without a reply header really has none, and does not just ignore the request for one."""
        content = message.get("content")
        if not isinstance(content, str) or not content.strip():
            return False
        text = str(self.tokenizer.decode(ids, skip_special_tokens=False))
        return text.lstrip().startswith(content.strip())

    def _turn_end(
        self, messages: list[Message], turn: int, tools: list[Any] | None, ids: list[int], start: int | None
    ) -> int | None:
        if start is None:
            return None
        prefix = ids
        if turn < len(messages) - 1:
            try:
                prefix = self._tokenize(self._render(messages[: turn + 1], tools))
            except RowProblem:
                return None
        end = self._end_of_reply(prefix, start)
        return end if end > start and prefix[:end] == ids[:end] else None

    def _end_of_reply(self, ids: Sequence[int], start: int) -> int:
        """Where the reply that ends `ids` is over: after its first closing special token, before trailing space."""
        tail = len(ids)
        while tail > start and (ids[tail - 1] in self.special_ids or self._is_space(ids[tail - 1])):
            tail -= 1
        return next((index + 1 for index in range(tail, len(ids)) if ids[index] in self.special_ids), tail)

    def _is_space(self, token_id: int) -> bool:
        return not str(self.tokenizer.decode([token_id])).strip()

    def _render(self, messages: list[Message], tools: list[Any] | None, **options: object) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options))
        except Exception as error:
            raise _template_problem(error) from error

    def _tokenize(self, text: str) -> list[int]:
        try:
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        except (UnicodeEncodeError, TypeError, ValueError) as error:
            raise RowProblem("the text is not valid Unicode", str(error).splitlines()[0]) from error
        return [int(i) for i in ids]


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset({int(i) for i, token in added.items() if token.special} | set(tokenizer.all_special_ids))


def _with_another_call_or_result(message: Message) -> Message | None:
    """Return a message with its called functions renamed or a tool's result replaced; None where it has neither."""
    if message["role"] == "tool":
        return {**message, "content": OTHER}
    if not message.get("tool_calls"):
        return None
    calls = [
        {**call, "function": {**call["function"], "name": OTHER}} if "function" in call else {**call, "name": OTHER}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _joined_parts(content: object) -> str | None:
    """Return the text of a list of text parts; None where it is something else."""
    if not isinstance(content, list) or not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        return None
    return "".join(part["text"] for part in content)


def _template_problem(error: Exception) -> RowProblem:
    return RowProblem("the chat template cannot render it", message_line(error))
