"""One corpus row: from a decoded JSON value to token ids and a loss mask, or the reason why not.

A row holds `prompt_ids` and `completion_ids`, or `messages`, or `prompt` and `completion` text. Where it holds
several, the ids win, then the messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CorpusError
from ..store.plan import count_anchors
from .chat import ChatEncoder, EncodedChat, Message, RowProblem

SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, kw_only=True, eq=False)
class CorpusRow:
    """A usable row: input_ids [T] int32, loss_mask [T] bool (true on reply tokens, the end token included).

    `num_prompt_tokens` is the index of the first reply token. The row ends with its last reply token.
    """

    id: str
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    num_prompt_tokens: int
    file: str
    line: int
    truncated: bool = False
    num_unmasked_turns: int = 0

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def num_anchors(self) -> int:
        """Positions a where loss_mask[a] and loss_mask[a + 1]."""
        return count_anchors(self.loss_mask)


class RowEncoder:
    """Turns decoded JSON values into rows for one target.

    Args:
        tokenizer: the target's.
        vocab_size: rows of the target's embeddings; every id must be smaller.
        max_length: longest row in tokens, or None.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, max_length: int | None) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_length = max_length
        self._chat: ChatEncoder | None = None

    def encode(self, value: object, default_id: str, file: str, line: int) -> CorpusRow:
        """Return the row that a line's JSON value holds.

        Raises:
            RowProblem: the row cannot be used; the corpus goes on without it.
            CorpusError: the whole corpus does not fit the target (no chat template, ids outside the vocabulary).
        """
        if not isinstance(value, dict):
            raise RowProblem("not a JSON object", f"found {type(value).__name__}")
        row_id = _row_id(value, default_id)
        encoded = self._tokens(value)
        self._check_vocabulary(encoded.ids, file, line)
        ids, mask, truncated = self._cut(encoded)
        return CorpusRow(
            id=row_id,
            input_ids=ids,
            loss_mask=mask,
            num_prompt_tokens=int(np.argmax(mask)),
            file=file,
            line=line,
            truncated=truncated,
            num_unmasked_turns=encoded.num_unmasked_turns,
        )

    def _tokens(self, row: dict[str, Any]) -> EncodedChat:
        if "prompt_ids" in row or "completion_ids" in row:
            prompt, completion = _id_list(row, "prompt_ids"), _id_list(row, "completion_ids")
            if not prompt:
                raise RowProblem("empty prompt", "prompt_ids is an empty list")
            if not completion:
                raise RowProblem("empty reply", "completion_ids is an empty list")
            return EncodedChat(prompt + completion, [False] * len(prompt) + [True] * len(completion))
        if "messages" in row:
            return self._render(check_messages(row["messages"]), _tools(row))
        if "prompt" in row or "completion" in row:
            prompt_text, completion_text = _text(row, "prompt"), _text(row, "completion")
            if not completion_text.strip():
                raise RowProblem("empty reply", "completion is empty")
            turns = [{"role": "user", "content": prompt_text}, {"role": "assistant", "content": completion_text}]
            return self._render(turns, _tools(row))
        raise RowProblem(
            "no known fields",
            "expected messages, or prompt and completion, or prompt_ids and completion_ids; found "
            f"{', '.join(sorted(map(str, row))[:6]) or 'an empty object'}",
        )

    def _render(self, messages: list[Message], tools: list[Any] | None) -> EncodedChat:
        if self._chat is None:
            self._chat = ChatEncoder(self.tokenizer)
        return self._chat.encode(messages, tools)

    def _check_vocabulary(self, ids: Sequence[int], file: str, line: int) -> None:
        worst = max(ids) if min(ids) >= 0 else min(ids)
        if not 0 <= worst < self.vocab_size:
            raise CorpusError(
                f"{file}:{line}: token id {worst} is outside the target's vocabulary of {self.vocab_size}: the corpus "
                "was made for another model, or with another tokenizer"
            )

    def _cut(self, encoded: EncodedChat) -> tuple[NDArray[np.int32], NDArray[np.bool_], bool]:
        mask = np.asarray(encoded.mask, dtype=np.bool_)
        if count_anchors(mask) == 0:
            raise RowProblem("reply too short", f"{int(mask.sum())} reply tokens; a block needs at least two in a row")
        num_tokens = int(np.flatnonzero(mask)[-1]) + 1  # what follows the last reply token is never read
        truncated = self.max_length is not None and num_tokens > self.max_length
        if truncated:
            mask = mask[: self.max_length]
            if count_anchors(mask) == 0:
                raise RowProblem("too long", f"the prompt alone fills the limit of {self.max_length} tokens")
            num_tokens = int(np.flatnonzero(mask)[-1]) + 1
        ids = np.asarray(encoded.ids[:num_tokens], dtype=np.int32)
        return ids, mask[:num_tokens].copy(), truncated


def check_messages(messages: object) -> list[Message]:
    """Return the messages up to the last assistant turn, if they are a conversation that can be learned from.

    Raises:
        RowProblem: not a list of messages, no reply, an empty reply, or the assistant speaks first.
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
    for index in replies:
        if _is_empty(messages[index]):
            raise RowProblem("empty reply", f"message {index + 1}")
    return messages[: replies[-1] + 1]


def _is_empty(message: Message) -> bool:
    content = message.get("content")
    empty = not content.strip() if isinstance(content, str) else not content
    return empty and not message.get("tool_calls") and not message.get("reasoning_content")


def _row_id(row: dict[str, Any], default_id: str) -> str:
    value = row.get("id")
    if value is None or value == "":
        return default_id
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RowProblem("id is neither text nor a whole number", f"found {type(value).__name__}")
    return str(value)


def _id_list(row: dict[str, Any], key: str) -> list[int]:
    if key not in row:
        other = "completion_ids" if key == "prompt_ids" else "prompt_ids"
        raise RowProblem(f"{other} without {key}")
    values = row[key]
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise RowProblem(f"{key} is not a list of whole numbers")
    return values


def _text(row: dict[str, Any], key: str) -> str:
    if key not in row:
        raise RowProblem(f"no {key}")
    if not isinstance(row[key], str):
        raise RowProblem(f"{key} is not text", f"found {type(row[key]).__name__}")
    return str(row[key])


def _tools(row: dict[str, Any]) -> list[Any] | None:
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise RowProblem("tools is not a list", f"found {type(tools).__name__}")
    return tools or None
