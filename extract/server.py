"""Completions of an OpenAI-compatible server: many requests at once, tried again where the server fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential,
    wait_random,
)

from ..errors import ConfigError, DflashError
from ..target.prompts import Prompt, prompt_messages
from .reply import Refused, Reply, read_reply

RETRY_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
FATAL_STATUS = frozenset({401, 403, 404, 405})
MOST_WAIT_SECONDS = 30.0
TELL_SECONDS = 5.0
TIMEOUT = httpx.Timeout(600.0, connect=10.0)

Answer = tuple[Prompt, Reply | Refused]


class _TryAgain(Exception):
    """A failure that may pass; `seconds` is what the server asked to wait."""

    def __init__(self, reason: str, seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.seconds = seconds


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where to ask, and how often.

    Attributes:
        url: of the server, with or without /v1.
        model: the name under which it serves the target.
        max_tokens: limit of a reply.
        concurrency: requests at once.
        attempts: tries of a request before the run stops.
        retry_seconds: first wait between tries; it doubles, up to 30 s.
        api_key: sent as a bearer token; None: none.
    """

    url: str
    model: str
    max_tokens: int
    concurrency: int = 16
    attempts: int = 8
    retry_seconds: float = 1.0
    api_key: str | None = None


class Server:
    """Asks greedily (temperature 0): text by chat completions, token ids by completions.

    `say` takes lines for people: that a request failed and is tried again, now and then.
    """

    def __init__(self, config: ServerConfig, say: Callable[[str], None]) -> None:
        self.config = config
        self.say = say
        self._told = -TELL_SECONDS
        base = config.url.rstrip("/")
        self.base = base if base.endswith("/v1") else f"{base}/v1"
        self._ids_wanted = True

    async def answers(self, prompts: Sequence[Prompt]) -> AsyncIterator[Answer]:
        """Yield each prompt with its reply, or why it was refused, in the order of arrival.

        Raises:
            ConfigError: the server does not serve the model, or refuses our requests as such.
            DflashError: it failed more often than `attempts` allows.
        """
        headers = {"Authorization": f"Bearer {self.config.api_key}"} if self.config.api_key else {}
        async with httpx.AsyncClient(timeout=TIMEOUT, headers=headers, limits=httpx.Limits()) as client:
            await self._check_model(client)
            waiting = iter(prompts)
            running: set[asyncio.Task[Answer]] = set()
            try:
                while True:
                    while len(running) < self.config.concurrency and (prompt := next(waiting, None)) is not None:
                        running.add(asyncio.create_task(self._answer(client, prompt)))
                    if not running:
                        return
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    failed = [task for task in done if task.exception() is not None]
                    for task in done:
                        if task not in failed:
                            yield task.result()
                    for task in failed:
                        task.result()
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    async def _answer(self, client: httpx.AsyncClient, prompt: Prompt) -> Answer:
        try:
            return prompt, read_reply(await self._ask(client, prompt), prompt, self.config.max_tokens)
        except Refused as refused:
            return prompt, refused

    async def _ask(self, client: httpx.AsyncClient, prompt: Prompt) -> dict[str, Any]:
        path = "/completions" if prompt.ids else "/chat/completions"
        what = {"prompt": prompt.ids} if prompt.ids else {"messages": prompt_messages(prompt.raw)}
        body: dict[str, Any] = {"model": self.config.model, "max_tokens": self.config.max_tokens, "temperature": 0}
        while True:
            asked_ids = self._ids_wanted
            response = await self._post(client, path, body | what | ({"return_token_ids": True} if asked_ids else {}))
            if response.status_code in (400, 422) and asked_ids and "return_token_ids" in response.text:
                self._ids_wanted = False  # a strict server that does not know the field
                continue
            break
        if response.status_code in FATAL_STATUS:
            raise ConfigError(f"{self.base}{path}: HTTP {response.status_code}: {_said(response)}; check --server")
        if response.status_code != httpx.codes.OK:
            raise Refused(f"HTTP {response.status_code}: {_said(response)}")
        value = response.json()
        if not isinstance(value, dict):
            raise Refused("not a completion")
        return value

    async def _post(self, client: httpx.AsyncClient, path: str, body: dict[str, Any] | None) -> httpx.Response:
        """Send until there is an answer that is not a passing failure."""
        pause = self.config.retry_seconds
        growing = wait_exponential(multiplier=pause, max=MOST_WAIT_SECONDS) + wait_random(0, pause)

        def wait(state: RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            asked = error.seconds if isinstance(error, _TryAgain) else 0.0
            return max(growing(state), min(asked, MOST_WAIT_SECONDS))

        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(_TryAgain),
                stop=stop_after_attempt(self.config.attempts),
                wait=wait,
                before_sleep=self._tell,
                reraise=True,
            ):
                with attempt:
                    return await _send(client, self.base + path, body)
        except _TryAgain as error:
            raise DflashError(
                f"{self.base}{path}: {self.config.attempts} tries failed, the last one: {error}; what was answered so "
                "far is kept: see to the server, and run the same command again"
            ) from error
        raise AssertionError("tenacity returns or raises")

    def _tell(self, state: RetryCallState) -> None:
        now = time.monotonic()
        if state.outcome is not None and now - self._told >= TELL_SECONDS:
            self._told = now
            self.say(
                f"{self.base}: {state.outcome.exception()}: trying again in {state.upcoming_sleep:.0f} s "
                f"({state.attempt_number} of {self.config.attempts} tries)"
            )

    async def _check_model(self, client: httpx.AsyncClient) -> None:
        """Refuse a name that the server does not serve, where it lists what it serves."""
        response = await self._post(client, "/models", None)
        try:
            served = [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            return
        if served and self.config.model not in served:
            raise ConfigError(f"{self.base}: it serves {', '.join(served[:5])}, not --model {self.config.model}")


async def _send(client: httpx.AsyncClient, url: str, body: dict[str, Any] | None) -> httpx.Response:
    """Send one request; a broken connection, a passing status and a body that is not JSON are worth another try."""
    try:
        response = await (client.get(url) if body is None else client.post(url, json=body))
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise ConfigError(f"--server {url}: {error}") from error
    except httpx.TransportError as error:
        raise _TryAgain(f"{type(error).__name__} {error}".strip()) from error
    if response.status_code in RETRY_STATUS:
        asked = response.headers.get("retry-after", "")
        raise _TryAgain(f"HTTP {response.status_code}: {_said(response)}", float(asked) if asked.isdigit() else 0.0)
    if response.status_code == httpx.codes.OK and body is not None:
        try:
            response.json()
        except ValueError as error:
            raise _TryAgain("its answer is not JSON, or was cut") from error
    return response


def _said(response: httpx.Response) -> str:
    return " ".join(response.text.split())[:200] or "no text"
