"""A real HTTP server on loopback that answers like vLLM, and misbehaves on demand."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def reply_to(prompt: str) -> str:
    """The one greedy reply to a prompt."""
    return f"The reply to {prompt!r} in {len(prompt)} letters."


def ids_of(text: str) -> list[int]:
    return list(text.encode())


class Misbehaving(ThreadingHTTPServer):
    """The first word of a prompt says how the server treats it: `fail2 ...` fails twice, `null ...` answers null.

    strict: refuse the field return_token_ids, and give no token ids.
    """

    daemon_threads = True

    def __init__(self, strict: bool = False, pause_seconds: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.strict, self.pause_seconds = strict, pause_seconds
        self.lock = threading.Lock()
        self.asked: Counter[str] = Counter()
        self.answered: list[str] = []
        self.running = self.most_running = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Misbehaving

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        chat = self.path == "/v1/chat/completions"
        prompt = body["messages"][-1]["content"] if chat else bytes(body["prompt"]).decode()
        with self.server.lock:
            self.server.asked[prompt] += 1
            tries = self.server.asked[prompt]
            self.server.running += 1
            self.server.most_running = max(self.server.most_running, self.server.running)
        try:
            self._answer(body, prompt, chat, tries)
        finally:
            with self.server.lock:
                self.server.running -= 1

    def _answer(self, body: dict[str, Any], prompt: str, chat: bool, tries: int) -> None:
        how = prompt.split(maxsplit=1)[0]
        if self.server.strict and "return_token_ids" in body:
            self._send(400, {"error": "unknown field return_token_ids"})
            return
        time.sleep(self.server.pause_seconds + (0.3 if how == "late" else 0))
        if how == "fail2" and tries <= 2:
            self._send(503, {"error": "overloaded"})
        elif how == "hangup" and tries == 1:
            self.close_connection = True
        elif how == "cut" and tries == 1:
            self.send_response(200)
            self.send_header("content-length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [{"mess')
            self.close_connection = True
        elif how == "down":
            self._send(500, {"error": "broken"})
        elif how == "toolong":
            self._send(400, {"error": "the prompt is too long"})
        else:
            self._send(200, self._completion(body, prompt, how, chat))
            with self.server.lock:
                self.server.answered.append(prompt)

    def _completion(self, body: dict[str, Any], prompt: str, how: str, chat: bool) -> dict[str, Any]:
        text: str | None = {"null": None, "empty": " \n"}.get(how, reply_to(prompt))
        ids = ids_of(text or "")
        counted, reason = len(ids), "stop"
        if how == "length":
            reason = "length"
        elif how == "unfinished":
            reason = None  # type: ignore[assignment]
        elif how == "lost":
            ids = ids[:-3]
        elif how == "full":
            counted = body["max_tokens"]
            ids = ids[:1] * counted
        choice: dict[str, Any] = {"finish_reason": reason, "index": 0}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        value: dict[str, Any] = {"choices": [choice], "usage": {"completion_tokens": counted}}
        if not self.server.strict:
            choice["token_ids"] = ids
            (value if chat else choice)["prompt_token_ids"] = ids_of(prompt)
        return value

    def _send(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
