"""One reply to a prompt, from whoever wrote it: kept whole, or refused with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..target.prompts import Prompt, prompt_messages

FINISHED = ("stop", "length")


class Refused(Exception):
    """A reply that must not be stored; the text is the reason that it is counted by."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A whole reply: text, `stop` or `length`, and the token ids of prompt and completion where they are known."""

    text: str
    finish_reason: str
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None


def read_reply(value: Mapping[str, Any], prompt: Prompt, max_tokens: int) -> Reply:
    """Return the reply in the JSON object of an OpenAI-compatible server (chat completion, or completion of ids).

    Token ids are read where the server gives them: vLLM and SGLang do for `return_token_ids`.

    Raises:
        Refused: there is no reply, it is empty, or it is not whole: no finish reason, cut at the limit but called
            finished, or fewer ids than the server counted.
    """
    choices = value.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise Refused("not a completion")
    choice = choices[0]
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    ids = _ids(choice.get("token_ids"))
    if text is None:
        raise Refused("null reply")
    if not isinstance(text, str):
        raise Refused("not a completion")
    if not text.strip():
        raise Refused("empty reply")
    if isinstance(message, dict) and ids is None and (message.get("reasoning_content") or message.get("reasoning")):
        raise Refused("the server splits the reasoning off and gives no token ids")
    prompt_ids = _ids(value.get("prompt_token_ids", choice.get("prompt_token_ids")))
    if prompt.ids and prompt_ids not in (None, prompt.ids):
        raise Refused("the server changed the prompt's token ids")
    if prompt.ids and ids is None:
        raise Refused("no token ids in answer to a prompt of token ids")
    usage = value.get("usage")
    counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
    _check_whole(choice.get("finish_reason"), ids, counted if type(counted) is int else None, max_tokens)
    prompt_ids = prompt.ids or prompt_ids
    known = bool(ids and prompt_ids)
    return Reply(
        text=text,
        finish_reason=choice["finish_reason"],
        prompt_ids=prompt_ids if known else None,
        completion_ids=ids if known else None,
    )


def _check_whole(reason: object, ids: list[int] | None, counted: int | None, max_tokens: int) -> None:
    if reason is None:
        raise Refused("no finish reason: the reply was cut without notice")
    if reason not in FINISHED:
        raise Refused(f"finish reason {str(reason)[:40]}")
    if ids is not None and counted is not None and len(ids) != counted:
        raise Refused("token ids and the server's count differ: the reply was cut without notice")
    length = counted if counted is not None else None if ids is None else len(ids)
    if reason == "stop" and length is not None and length >= max_tokens:
        raise Refused("as long as the limit, but called finished: the reply may have been cut without notice")


def reply_row(prompt: Prompt, reply: Reply, model: str, max_tokens: int) -> dict[str, Any]:
    """Return the row of a corpus: the prompt as it was asked, the reply, and who wrote it under which limit."""
    raw = prompt.raw
    row: dict[str, Any] = {"id": prompt.id, **asked(prompt)}
    if reply.completion_ids is None and "messages" in row:
        row["messages"] = [*row["messages"], {"role": "assistant", "content": reply.text}]
    else:
        row["completion"] = reply.text
    if isinstance(raw.get("source"), str):
        row["source"] = raw["source"]
    if reply.completion_ids is not None:
        row |= {"prompt_ids": reply.prompt_ids, "completion_ids": reply.completion_ids}
    return row | {"finish_reason": reply.finish_reason, "model": model, "max_tokens": max_tokens}


def asked(prompt: Prompt) -> dict[str, Any]:
    """Return what a prompt asks, as fields of a row: its text where there is any, else its ids."""
    messages = prompt_messages(prompt.raw)
    if messages is None:
        return {"prompt_ids": prompt.ids}
    return {"messages": messages} if "messages" in prompt.raw else {"prompt": prompt.raw["prompt"]}


def _ids(value: object) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise Refused("token ids that are not whole numbers")
    return value
