"""Chat documents made from the Python standard library of the running installation.

Each short function of the library's own sources gives two kinds of documents. Either the user shows its first lines
and the assistant writes the rest, or the user shows its signature and the assistant says what each parameter is. The
text is the one that every Python installation carries, so no download is needed; other Python versions carry slightly
other text.
"""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

END = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
NUM_RESERVED = 5
SPECIAL_TOKENS = (END, TURN_START, TURN_END, *(f"<|reserved_{index}|>" for index in range(NUM_RESERVED)))

CHAT_TEMPLATE = (
    "{%- for message in messages -%}\n"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}\n"
    "{%- if message['role'] == 'assistant' -%}\n"
    "{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}\n"
    "{%- else -%}{{- message['content'] + '<|im_end|>' -}}{%- endif -%}\n"
    "{{- '\\n' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}\n"
)
COMPLETE = "Complete this function:\n"
EXPLAIN = "Explain the parameters of this function:\n"
EXPLAIN_SHARE = 0.45
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")

LEFT_OUT = frozenset(
    {"test", "tests", "site-packages", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data", "__pycache__"}
)
MIN_CHARS, MAX_CHARS = 60, 900
HELD_OUT_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class Function:
    """One function of the standard library."""

    name: str
    """Where it stands: `<path below the library>:<line>`."""
    lines: tuple[str, ...]
    """Its source, indented from the left margin."""
    first_body_line: int
    """Index of the line where the body begins (its docstring, if it has one): the earliest cut."""
    held_out: bool
    """Whether the target is trained without it (by a hash of its source)."""

    explanation: str
    """What each parameter is, in sentences; empty where there is none to explain."""

    def complete(self, source: random.Random) -> tuple[str, str]:
        """Return (user's message, assistant's reply): the first lines, cut where `source` says, and the rest."""
        cut = source.randint(self.first_body_line, max(self.first_body_line, len(self.lines) * 2 // 3))
        return COMPLETE + "\n".join(self.lines[:cut]), "\n".join(self.lines[cut:])

    def explain(self) -> tuple[str, str]:
        """Return (user's message, assistant's reply): the signature, and what each parameter is."""
        return EXPLAIN + "\n".join(self.lines[: self.first_body_line]), self.explanation

    def document(self, source: random.Random) -> tuple[str, str]:
        """Return (user's message, assistant's reply) of a kind that `source` draws."""
        if source.random() < EXPLAIN_SHARE and self.explanation:
            return self.explain()
        return self.complete(source)


def standard_library_functions(root: Path | None = None) -> list[Function]:
    """Return the short functions of the standard library, each source text once, in the order of their files.

    `root` is the library's folder; None takes the running installation's. Files that do not parse are left out.
    """
    library = Path(sysconfig.get_path("stdlib")) if root is None else root
    seen: set[str] = set()
    functions = []
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if LEFT_OUT.intersection(parts) or any(part.startswith("config-") for part in parts):
            continue
        for function in _functions_of(path, "/".join(parts)):
            text = "\n".join(function.lines)
            if text not in seen:
                seen.add(text)
                functions.append(function)
    return functions


def prompt_text(user: str) -> str:
    """Render a user's message as the chat template does, up to where the assistant begins."""
    return f"{TURN_START}user\n{user}{TURN_END}\n{TURN_START}assistant\n"


def explanation_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return one sentence per parameter, `self` and `cls` left out, or nothing where there is none."""
    arguments = function.args
    by_place = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(by_place) - len(arguments.defaults))
    defaults += arguments.defaults
    named = [pair for pair in zip(by_place, defaults, strict=True) if pair[0].arg not in ("self", "cls")]
    lines = [
        f"`{argument.arg}` comes {ordinal} and {_value(default)}."
        for ordinal, (argument, default) in zip(ORDINALS, named, strict=False)
    ]
    if arguments.vararg:
        lines.append(f"`{arguments.vararg.arg}` takes the further arguments by place.")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        lines.append(f"`{argument.arg}` is passed by name and {_value(default)}.")
    if arguments.kwarg:
        lines.append(f"`{arguments.kwarg.arg}` takes the further arguments by name.")
    return "\n".join([f"The function `{function.name}` is called like this.", *lines]) if lines else ""


def _value(default: ast.expr | None) -> str:
    return "must be given" if default is None else f"is {ast.unparse(default)} when left out"


def _functions_of(path: Path, name: str) -> Iterator[Function]:
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    source_lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
            continue
        text = textwrap.dedent("\n".join(source_lines[node.lineno - 1 : node.end_lineno]))
        lines = tuple(line.rstrip() for line in text.splitlines())
        first = node.body[0].lineno - node.lineno
        if not MIN_CHARS <= len(text) <= MAX_CHARS or not text.isascii() or "\t" in text or not 0 < first < len(lines):
            continue
        digest = hashlib.sha256(text.encode()).digest()
        held_out = int.from_bytes(digest[:4], "little") < HELD_OUT_SHARE * 2**32
        yield Function(
            name=f"{name}:{node.lineno}",
            lines=lines,
            first_body_line=first,
            held_out=held_out,
            explanation=explanation_of(node),
        )
