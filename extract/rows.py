"""One corpus row: from a decoded JSON value to token ids and a loss mask, or the reason why not.

A row holds one of these forms; where it holds several, the first counts:

    prompt_ids, completion_ids    token ids
    input_ids [, loss_mask]       token ids; without a mask they are like text
    messages                      a conversation; so is `conversations` (messages.py)
    prompt, completion            text of one turn each
    text                          plain text, without a template; every token but the first few is learned
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..store.plan import count_anchors
from .chat import ChatEncoder, EncodedChat, Message, RowProblem
from .messages import check_messages, from_conversations

FORMS = (
    "prompt_ids", "completion_ids", "input_ids", "loss_mask", "messages", "conversations", "prompt", "completion",
    "text",
)  # fmt: skip
FIELDS = ("id", *FORMS, "tools")
PROMPT_TOKENS_OF_TEXT = 16
"""Text without a prompt is held out or not by its first tokens: few enough to learn from the rest, and enough for texts
to differ in them, since texts that share them fall together."""


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
            CorpusError: the whole corpus does not fit the target (no chat template).
        """
        if not isinstance(value, dict):
            array = "; the file of a JSON array is to be named .json" if isinstance(value, list) else ""
            raise RowProblem("not a JSON object", f"found {type(value).__name__}{array}")
        nulls = [key for key in FORMS if key in value and value[key] is None]
        value = {key: entry for key, entry in value.items() if entry is not None}
        if not value.keys() & set(FORMS):
            found = ", ".join(sorted(map(str, value))[:6]) or "an empty object"
            raise RowProblem(
                "no known fields",
                f"{', '.join(nulls)}: null" if nulls else f"expected {', '.join(FORMS)}; found {found}",
            )
        row_id = _row_id(value, default_id)
        encoded = self._tokens(value)
        self._check_vocabulary(encoded.ids)
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
        if "input_ids" in row or "loss_mask" in row:
            return _ready(_id_list(row, "input_ids"), row.get("loss_mask"))
        if "messages" in row:
            return self._render(check_messages(row["messages"]), _tools(row))
        if "conversations" in row:
            return self._render(check_messages(from_conversations(row["conversations"])), _tools(row))
        if "prompt" in row or "completion" in row:
            prompt_text, completion_text = _text(row, "prompt"), _text(row, "completion")
            if not completion_text.strip():
                raise RowProblem("empty reply", "completion is empty")
            turns = [{"role": "user", "content": prompt_text}, {"role": "assistant", "content": completion_text}]
            return self._render(turns, _tools(row))
        return _unprompted(self._text_ids(_text(row, "text")))

    def _text_ids(self, text: str) -> list[int]:
        """Tokenize text as the tokenizer does by default, but never with two beginnings."""
        if not text.strip():
            raise RowProblem("empty text")
        try:
            bare = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            ids = self.tokenizer(text, verbose=False)["input_ids"]
        except (UnicodeEncodeError, TypeError, ValueError) as error:
            raise RowProblem("the text is not valid Unicode", str(error).splitlines()[0]) from error
        return list(bare if bare[:1] == [self.tokenizer.bos_token_id] else ids)

    def _render(self, messages: list[Message], tools: list[Any] | None) -> EncodedChat:
        if self._chat is None:
            self._chat = ChatEncoder(self.tokenizer)
        return self._chat.encode(messages, tools)

    def _check_vocabulary(self, ids: Sequence[int]) -> None:
        worst = max(ids) if min(ids) >= 0 else min(ids)
        if not 0 <= worst < self.vocab_size:
            raise RowProblem(
                "token id outside the vocabulary",
                f"id {worst}, the target has 0 to {self.vocab_size - 1}: was the row made with another tokenizer?",
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


def _ready(ids: list[int], mask: object) -> EncodedChat:
    if not ids:
        raise RowProblem("empty text", "input_ids is an empty list")
    if mask is None:
        return _unprompted(ids)
    if not isinstance(mask, list) or len(mask) != len(ids) or not all(value in (0, 1) for value in mask):
        raise RowProblem("loss_mask is not a list of 0 and 1, one for each of input_ids")
    learned = [bool(value) for value in mask]
    return _unprompted(ids, learned) if learned[0] else EncodedChat(ids, learned)


def _unprompted(ids: list[int], mask: list[bool] | None = None) -> EncodedChat:
    """Let the first tokens of a row without a prompt stand for one."""
    num_prompt = max(1, min(PROMPT_TOKENS_OF_TEXT, len(ids) // 2))
    return EncodedChat(ids, [False] * num_prompt + (mask or [True] * len(ids))[num_prompt:])


def _row_id(row: dict[str, Any], default_id: str) -> str:
    value = row.get("id")
    if value is None or value == "":
        return default_id
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RowProblem("id is neither text nor a whole number", f"found {type(value).__name__}")
    return str(value)


def _id_list(row: dict[str, Any], key: str) -> list[int]:
    if key not in row:
        other = {"prompt_ids": "completion_ids", "completion_ids": "prompt_ids", "input_ids": "loss_mask"}[key]
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
    if isinstance(tools, str) and tools.strip():  # Parquet has no column for schemas that differ from row to row
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise RowProblem("tools is not a list", f"nor the JSON of one: {error}") from error
    if tools is not None and not isinstance(tools, list):
        raise RowProblem("tools is not a list", f"found {type(tools).__name__}")
    return tools or None
