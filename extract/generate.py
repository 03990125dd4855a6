"""`dflash generate`: the target's own greedy completions of a prompts file, as a corpus for `dflash extract`."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..errors import CacheMismatch, ConfigError, DflashError, counted
from ..target import TargetConfig, load_target
from ..target.prompts import Prompt, Prompts, read_prompts
from .journal import Journal
from .local import LocalTarget
from .reply import Refused, Reply, reply_row
from .server import Server, ServerConfig

REPORT_SECONDS = 10.0
SHOWN_IDS = 5

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What `dflash generate` is told. The command line takes its defaults from here.

    Attributes:
        prompts: a prompts file (target/prompts.py says what it may hold); a corpus will do.
        out: the corpus to write, JSON lines.
        server, model: an OpenAI-compatible server, and the name under which it serves the target.
        target: instead of a server, a folder or Hugging Face name, run on this machine.
        max_tokens: limit of a reply.
        concurrency: requests at once.
        batch_rows: prompts that a local target reads at once.
        dtype, device: of a local target.
        attempts, retry_seconds: see `ServerConfig`.
        api_key: of the server.

    Raises:
        ConfigError: a value is out of range, or not exactly one of server and target is given.
    """

    prompts: Path
    out: Path
    server: str | None = None
    model: str | None = None
    target: str | None = None
    max_tokens: int = 1024
    concurrency: int = 16
    batch_rows: int = 8
    dtype: str | None = None
    device: str = "auto"
    attempts: int = 8
    retry_seconds: float = 1.0
    api_key: str | None = None

    def __post_init__(self) -> None:
        if (self.server is None) == (self.target is None):
            raise ConfigError("give either --server with --model, or --target")
        if (self.server is None) != (self.model is None):
            raise ConfigError("--server and --model go together: the name under which the server serves the target")
        if self.server is not None and self.dtype is not None:
            raise ConfigError("--dtype is of a local --target; a server has its own")
        for name in ("max_tokens", "concurrency", "batch_rows", "attempts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}: expected at least 1")

    @property
    def writer(self) -> str:
        """Who writes, as the rows record it."""
        return self.model or str(self.target)


def run_generate(config: GenerateConfig, say: Say) -> dict[str, Any]:
    """Write a completion of every prompt, or go on where an interrupted run stopped.

    Every row names the model and the limit, so a finished file grows by new prompts and is refused for other settings.
    Replies that are empty, null or not whole are refused and counted; running the command again asks for them again.

    Args:
        config: see `GenerateConfig`.
        say: takes lines for people.

    Returns:
        The JSON object of `dflash generate --json`: out, prompts, rows, resumed_rows, refused {reason: n},
        skipped {reason: n} (prompts that cannot be used), token_ids (rows that carry them), seconds.

    Raises:
        CorpusError: the prompts cannot be read.
        CacheMismatch: OUT holds rows of other prompts or settings, or another process writes it.
        TargetError, ConfigError: the target cannot be loaded, or the server does not take our requests.
        DflashError: the server failed too often, or no reply is usable.
    """
    started = time.perf_counter()
    config.out.absolute().parent.mkdir(parents=True, exist_ok=True)
    lock = config.out.with_name(f".{config.out.name}.lock")
    try:
        with FileLock(lock, timeout=0):
            result = _generate(config, say)
            lock.unlink(missing_ok=True)
    except Timeout:
        raise CacheMismatch(f"{config.out}: another process is writing it") from None
    return result | {"seconds": time.perf_counter() - started}


def _generate(config: GenerateConfig, say: Say) -> dict[str, Any]:
    local = _load(config, say) if config.target else None
    found = _read_prompts(config, local, say)
    journal = Journal(config.out, found.prompts, config.writer, config.max_tokens)
    before = len(journal.ids)
    missing = [prompt for prompt in found.prompts if prompt.id not in journal.ids]
    work = _Work(config, journal, len(found.prompts), say)
    try:
        if journal.finished:
            say(f"{config.out}: every prompt has its reply already")
        elif local:
            for prompt, reply in local.answers(missing):
                work.take(prompt, reply)
        else:
            asyncio.run(_ask_server(config, missing, work))
        if not journal.ids:
            raise DflashError(f"{config.out}: no usable reply: {work.refusals()}")
        if not journal.finished:
            journal.finish()
    finally:
        journal.close()
    for reason, ids in work.refused.items():
        shown = ", ".join(ids[:SHOWN_IDS]) + (", ..." if len(ids) > SHOWN_IDS else "")
        say(f"refused {len(ids)} replies: {reason}: {shown}; the same command asks for them again")
    return {
        "out": str(config.out),
        "prompts": len(found.prompts),
        "rows": len(journal.ids),
        "resumed_rows": before,
        "refused": {reason: len(ids) for reason, ids in work.refused.items()},
        "skipped": found.skipped,
        "new_token_id_rows": work.with_ids,
        "model": config.writer,
        "max_tokens": config.max_tokens,
    }


class _Work:
    """Takes answers as they arrive: keeps replies, counts refusals, tells how far it is."""

    def __init__(self, config: GenerateConfig, journal: Journal, total: int, say: Say) -> None:
        self.config, self.journal, self.total, self.say = config, journal, total, say
        self.refused: dict[str, list[str]] = defaultdict(list)
        self.with_ids = 0
        self._first = len(journal.ids)
        self._started = self._spoke = time.perf_counter()

    def take(self, prompt: Prompt, reply: Reply | Refused) -> None:
        """Keep a reply, or count why not."""
        if isinstance(reply, Refused):
            self.refused[str(reply)].append(prompt.id)
        else:
            self.journal.append(reply_row(prompt, reply, self.config.writer, self.config.max_tokens))
            self.with_ids += reply.completion_ids is not None
        now = time.perf_counter()
        if now - self._spoke > REPORT_SECONDS:
            self._spoke = now
            done = len(self.journal.ids)
            rate = (done - self._first) / (now - self._started)
            left = f"{(self.total - done) / rate:,.0f} s left" if rate else "none yet"
            self.say(f"{done:,}/{self.total:,} rows  {rate:.2f} rows/s  {left}")

    def refusals(self) -> str:
        """Return the reasons and their counts, as one line."""
        return "; ".join(f"{len(ids)} times {reason}" for reason, ids in self.refused.items())


async def _ask_server(config: GenerateConfig, prompts: Sequence[Prompt], work: _Work) -> None:
    server = Server(
        ServerConfig(
            url=config.server or "",
            model=config.model or "",
            max_tokens=config.max_tokens,
            concurrency=config.concurrency,
            attempts=config.attempts,
            retry_seconds=config.retry_seconds,
            api_key=config.api_key,
        ),
        work.say,
    )
    async for prompt, reply in server.answers(prompts):
        work.take(prompt, reply)


def _load(config: GenerateConfig, say: Say) -> LocalTarget:
    target = load_target(TargetConfig(name=str(config.target), dtype=config.dtype, device=config.device))
    for notice in target.notices:
        say(notice)
    return LocalTarget(target, config.max_tokens, config.batch_rows)


def _read_prompts(config: GenerateConfig, local: LocalTarget | None, say: Say) -> Prompts:
    target = local.target if local else None
    found = read_prompts(
        config.prompts, target.tokenizer if target else None, vocab_size=target.vocab_size if target else None
    )
    with_tools = [prompt for prompt in found.prompts if prompt.raw.get("tools")]
    if with_tools:
        raise ConfigError(
            f"{config.prompts}: {counted(len(with_tools), 'prompt')} with tools, such as {with_tools[0].id}: calls of "
            "tools are not generated; take these prompts out"
        )
    for notice in found.notices(config.prompts):
        say(notice)
    return found
