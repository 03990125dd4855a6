"""Choosing the token that stands for "not yet drafted" in a block.

The drafter reads the embedding of this token in slots 1..B-1, and serving engines look it up in the target's own
embedding table: so it must be a row of that table which no text uses.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError

_RESERVED = re.compile(r"reserved|unused|placeholder|extra_id|extra_token|dummy", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """The part of a tokenizer's files that the choice needs.

    `size` is the first id past the tokenizer's own tokens (0: unknown); `special` maps the ids of special tokens to
    their text; `used` holds the texts of tokens with a role (bos, eos, pad, unk) and `template` the chat template.
    """

    size: int = 0
    special: dict[int, str]
    mask: str | None
    used: frozenset[str]
    template: str


def read_tokenizer_facts(directory: Path) -> TokenizerFacts:
    """Read tokenizer.json, tokenizer_config.json and chat_template.jinja of a target folder, as far as they exist."""

    def read(name: str) -> dict[str, object]:
        path = directory / name
        value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return value if isinstance(value, dict) else {}

    full, config = read("tokenizer.json"), read("tokenizer_config.json")
    added = [token for token in _items(full.get("added_tokens")) if isinstance(token.get("id"), int)]
    model = full.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    largest = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab or []) - 1
    largest = max([largest, *(int(str(token["id"])) for token in added)])
    roles = {name: _text(config.get(f"{name}_token")) for name in ("bos", "eos", "pad", "unk", "mask")}
    template = directory / "chat_template.jinja"
    return TokenizerFacts(
        size=largest + 1,
        special={int(str(token["id"])): str(token.get("content")) for token in added if token.get("special")},
        mask=roles.pop("mask"),
        used=frozenset(text for text in roles.values() if text),
        template=template.read_text(encoding="utf-8") if template.exists() else str(config.get("chat_template", "")),
    )


def choose_mask_token(wanted: int | None, tokenizer: TokenizerFacts, vocab_size: int) -> int:
    """Return the id of the mask token: the wanted one, else a mask token, a reserved token, an unused row.

    Args:
        wanted: the id a recipe asks for.
        tokenizer: see `read_tokenizer_facts`.
        vocab_size: rows of the target's embedding.

    Raises:
        ConfigError: the wanted id has no row, or no unused row is found.
    """
    if wanted is not None:
        if not 0 <= wanted < vocab_size:
            raise ConfigError(f"mask_token_id = {wanted}: the target's embedding has rows 0 to {vocab_size - 1}")
        return wanted
    special = {i: text for i, text in sorted(tokenizer.special.items()) if i < vocab_size}
    for token_id, text in special.items():
        if text == tokenizer.mask or "mask" in text.lower():
            return token_id
    free = {i: text for i, text in special.items() if text not in tokenizer.used and text not in tokenizer.template}
    for token_id, text in free.items():
        if _RESERVED.search(text):
            return token_id
    if 0 < tokenizer.size < vocab_size:
        return tokenizer.size
    if free:
        return max(free)
    raise ConfigError(
        "the target has no mask token, no reserved token and no spare embedding row; "
        "pass the id of a token that no text uses with --set mask_token_id=ID"
    )


def _items(value: object) -> list[dict[str, object]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _text(token: object) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
