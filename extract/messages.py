"""The forms in which people write conversations, brought to one: `messages` of role and content.

    messages        [{"role", "content", "tool_calls"...}]
    conversations   [{"from", "value"}], or the same as messages

Content may be missing or null where an assistant only calls tools. A call's arguments are an object in the end, as
chat templates expect and as servers hand them over, whether the row has an object or its JSON text.
"""

from __future__ import annotations

import json
from typing import Any

from .chat import Message, RowProblem

SYSTEM_ROLES = ("system", "developer")
SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "chatgpt": "assistant", "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "assistant",
}  # fmt: skip


def from_conversations(turns: object) -> object:
    """Return the messages that `conversations` holds; what is no list of turns is returned as it is.

    Raises:
        RowProblem: a speaker is unknown.
    """
    if not isinstance(turns, list) or not all(isinstance(turn, dict) and "from" in turn for turn in turns):
        return turns
    messages: list[object] = []
    for number, turn in enumerate(turns, 1):
        speaker = str(turn["from"]).lower()
        role = SPEAKERS.get(speaker)
        if role is None:
            raise RowProblem("an unknown speaker", f"turn {number} is from {str(turn['from'])[:40]!r}")
        if speaker == "function_call":
            call = {"type": "function", "function": turn.get("value")}
            messages.append({"role": role, "content": None, "tool_calls": [call]})
        else:
            messages.append({"role": role, "content": turn.get("value")})
    return messages


def check_messages(messages: object) -> list[Message]:
    """Return the messages up to the last assistant turn, if they are a conversation that can be learned from.

    Every one has the key `content`, which is None in an assistant turn without text; other null keys are left out.

    Raises:
        RowProblem: not a list of messages, no reply, an empty reply, a message without content or with an image,
            faulty tool calls, or the assistant speaks first.
    """
    if not isinstance(messages, list):
        raise RowProblem("messages is not a list", f"found {type(messages).__name__}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowProblem("a message without a role", f"message {number}")
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not replies:
        raise RowProblem("no assistant reply", f"{len(messages)} messages")
    if all(message["role"] in SYSTEM_ROLES for message in messages[: replies[0]]):
        raise RowProblem("the assistant speaks first")
    return [_clean(message, number) for number, message in enumerate(messages[: replies[-1] + 1], 1)]


def _clean(message: Message, number: int) -> Message:
    found = {key: value for key, value in message.items() if value is not None}
    content = found.setdefault("content", None)
    other = next((part["type"] for part in _parts(found) if part["type"] != "text"), None)
    if other is not None:  # the target is given token ids alone
        raise RowProblem("content has parts that are not text", f"message {number}: {other}")
    if found["role"] != "assistant":
        if content is None:
            raise RowProblem("a message without content", f"message {number}")
        return found
    if found.get("tool_calls"):
        found["tool_calls"] = [_clean_call(call, number) for call in _call_list(found["tool_calls"], number)]
    else:
        found.pop("tool_calls", None)
        empty = not content.strip() if isinstance(content, str) else not content
        if empty and not found.get("reasoning_content"):
            raise RowProblem("empty reply", f"message {number}")
    return found


def _parts(message: Message) -> list[dict[str, Any]]:
    """Return the parts of which content is made, if it is; what a tool returns is whatever it is."""
    content = message["content"]
    if message["role"] == "tool" or not isinstance(content, list):
        return []
    return [part for part in content if isinstance(part, dict) and isinstance(part.get("type"), str)]


def _call_list(calls: object, number: int) -> list[Any]:
    if not isinstance(calls, list):
        raise RowProblem("tool_calls is not a list", f"message {number}: found {type(calls).__name__}")
    return calls


def _clean_call(call: object, number: int) -> dict[str, Any]:
    """Return a call, {"function": {"name", "arguments"}} or the inner part alone, with its arguments as an object."""
    if not isinstance(call, dict):
        raise RowProblem("a tool call is no object", f"message {number}: found {type(call).__name__}")
    found = {key: value for key, value in call.items() if value is not None}
    inner = _parsed(found["function"], number) if "function" in found else found
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise RowProblem("a tool call without a function's name", f"message {number}")
    inner = {**inner, "arguments": _parsed(inner.get("arguments") or {}, number)}
    if not isinstance(inner["arguments"], dict | list):
        raise RowProblem("a tool call's arguments are no object", f"message {number}")
    return {**found, "function": inner} if "function" in found else inner


def _parsed(value: object, number: int) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowProblem("a tool call is not JSON", f"message {number}: {error}") from error
