"""A prompts file: JSON lines, each a prompt that the target is to answer, with an id and a source.

    {"prompt": "...", "source": "gsm8k"}                            one user turn, by the target's chat template
    {"messages": [{"role": "user", "content": "..."}]}              a conversation; a reply at its end is left off
    {"prompt_ids": [1, 2, 3]}                                       token ids as they are; they win over text

So a corpus file is a prompts file too: what it holds of completions is not read. `id` and `source` are optional.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CorpusError, counted

UNNAMED_SOURCE = "prompts"


class _Unusable(Exception):
    """A prompt cannot be used; the reason."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt: its id, its source (`prompts` where the file names none), its token ids, and the line's object."""

    id: str
    source: str
    ids: list[int]
    raw: Mapping[str, Any]


@dataclass(kw_only=True)
class Prompts:
    """The usable prompts of a file in its order, and where the others stand, by reason."""

    prompts: list[Prompt] = field(default_factory=list)
    skipped_lines: dict[str, list[int]] = field(default_factory=dict)

    @property
    def skipped(self) -> dict[str, int]:
        """How many prompts were left out, by reason."""
        return {reason: len(lines) for reason, lines in self.skipped_lines.items()}

    def notices(self, path: Path) -> list[str]:
        """One line for each reason of skipping, with the first lines."""
        return [
            f"skipped {counted(len(lines), 'prompt')}: {reason}: {path}:{', '.join(map(str, lines[:5]))}"
            + (", ..." if len(lines) > 5 else "")
            for reason, lines in self.skipped_lines.items()
        ]


def read_prompts(
    path: Path,
    tokenizer: Any | None,
    *,
    vocab_size: int | None = None,
    max_tokens: int | None = None,
    limit: int | None = None,
) -> Prompts:
    """Read a prompts file.

    Args:
        path: JSON lines, UTF-8; a byte order mark and blank lines change nothing.
        tokenizer: the target's, with its chat template; None where a server will make ids of text, which then has none.
        vocab_size: rows of the target's embeddings; None: ids are not checked.
        max_tokens: longer prompts are skipped.
        limit: stop after so many usable prompts.

    Raises:
        CorpusError: there is no such file, two prompts have one id, an id lies outside the vocabulary, the target has
            no chat template and the file no ids, or no prompt is usable.
    """
    if not path.is_file():
        raise CorpusError(f"{path}: there is no such prompts file")
    found = Prompts()
    lines_by_id: dict[str, int] = {}
    with path.open("rb") as file:
        for line, content in numbered_lines(file):
            if limit is not None and len(found.prompts) >= limit:
                break
            try:
                prompt = _prompt(content, f"{path.stem}:{line}", tokenizer, f"{path}:{line}")
                if max_tokens is not None and len(prompt.ids) > max_tokens:
                    raise _Unusable(f"longer than {max_tokens} tokens")
            except _Unusable as problem:
                found.skipped_lines.setdefault(str(problem), []).append(line)
                continue
            worst = min(prompt.ids, key=lambda value: (value >= 0, -value), default=0)
            if vocab_size is not None and not 0 <= worst < vocab_size:
                raise CorpusError(
                    f"{path}:{line}: token id {worst} is outside the target's vocabulary of {vocab_size}: the prompts "
                    "were made for another model"
                )
            if prompt.id in lines_by_id:
                raise CorpusError(
                    f"prompt id {prompt.id!r} is used twice, at {path}:{lines_by_id[prompt.id]} and at {path}:{line}: "
                    "make the ids different, or leave them out (prompts are then named by line)"
                )
            lines_by_id[prompt.id] = line
            found.prompts.append(prompt)
    if not found.prompts:
        raise CorpusError("; ".join([f"{path}: no usable prompt", *found.notices(path)]))
    return found


def numbered_lines(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a JSON-lines file that are not blank, numbered from 1, without a byte order mark."""
    for number, data in enumerate(file, 1):
        line = data.removeprefix(codecs.BOM_UTF8) if number == 1 else data
        if line.strip():
            yield number, line


def _prompt(data: bytes, default_id: str, tokenizer: Any | None, place: str) -> Prompt:
    try:
        raw = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise _Unusable("not UTF-8") from None
    except (ValueError, RecursionError):
        raise _Unusable("not JSON") from None
    if not isinstance(raw, dict):
        raise _Unusable("not a JSON object")
    row_id, source = raw.get("id"), raw.get("source")
    if row_id is not None and (isinstance(row_id, bool) or not isinstance(row_id, str | int)):
        raise _Unusable("id is neither text nor a whole number")
    if source is not None and not isinstance(source, str):
        raise _Unusable("source is not text")
    name = default_id if row_id is None or row_id == "" else str(row_id)
    return Prompt(id=name, source=source or UNNAMED_SOURCE, ids=_ids(raw, tokenizer, place), raw=raw)


def _ids(raw: Mapping[str, Any], tokenizer: Any | None, place: str) -> list[int]:
    if "prompt_ids" in raw:
        ids = raw["prompt_ids"]
        if not isinstance(ids, list) or not all(type(value) is int for value in ids):
            raise _Unusable("prompt_ids is not a list of whole numbers")
        if not ids:
            raise _Unusable("empty prompt")
        return ids
    messages = prompt_messages(raw)
    if messages is None:
        raise _Unusable("no prompt, no messages and no prompt_ids")
    if tokenizer is None:
        return []
    if not getattr(tokenizer, "chat_template", None):
        raise CorpusError(
            f"{place}: the target's tokenizer has no chat template to make a prompt of text with: give prompt_ids"
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = [int(value) for value in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
    except Exception as error:  # templates raise what they like
        raise _Unusable("the chat template cannot render it") from error
    if not ids:
        raise _Unusable("empty prompt")
    return ids


def prompt_messages(raw: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the conversation that a line asks to go on with, None where it holds no text.

    The text of `prompt` is one user turn; of `messages`, replies at the end are left off.
    """
    if isinstance(raw.get("prompt"), str) and "messages" not in raw:
        return [{"role": "user", "content": raw["prompt"]}] if raw["prompt"].strip() else None
    messages = raw.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None
    while messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    return messages or None
