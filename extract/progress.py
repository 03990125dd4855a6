"""What an extraction tells the user while it runs: notices, tokens a second, time left, share of padding."""

from __future__ import annotations

import sys
import time
from typing import Protocol

REPORT_SECONDS = 10.0


class Progress(Protocol):
    """Where an extraction reports to."""

    def notice(self, text: str) -> None:
        """Tell the user one line."""

    def start(self, num_tokens: int, num_done: int) -> None:
        """Begin the forwards: tokens of the whole cache, and how many an earlier run has done."""

    def advance(self, num_tokens: int, num_padding: int) -> None:
        """A batch is done: its real tokens, and the padding computed beside them."""

    def stop(self) -> None:
        """The forwards are over, done or not. May be called without `start`."""


class SilentProgress:
    """Reports nowhere."""

    def notice(self, text: str) -> None:
        """Drop the line."""

    def start(self, num_tokens: int, num_done: int) -> None:
        """Do nothing."""

    def advance(self, num_tokens: int, num_padding: int) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


class RichProgress:
    """Reports to stderr: a bar on a terminal, elsewhere a line every ten seconds and at the end."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415 - only where it is shown
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415
        from rich.progress import Progress as Bar  # noqa: PLC0415

        self._console = Console(file=sys.stderr, soft_wrap=True, highlight=False)
        self._bar = Bar(
            TextColumn("extract"), BarColumn(), TextColumn("{task.fields[line]}"), TimeRemainingColumn(),
            console=self._console, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("extract", total=None, line="")
        self._total = self._first = self._done = self._padding = 0
        self._started = self._reported = 0.0

    def notice(self, text: str) -> None:
        """Print one line to stderr."""
        self._console.print(text, markup=False)

    def start(self, num_tokens: int, num_done: int) -> None:
        """Show the bar."""
        self._total, self._first, self._done, self._padding = num_tokens, num_done, num_done, 0
        self._started = self._reported = time.monotonic()
        self._bar.update(self._task, total=num_tokens, completed=num_done)
        self._bar.start()

    def advance(self, num_tokens: int, num_padding: int) -> None:
        """Move the bar on, or print a line if the last one is ten seconds old."""
        self._done += num_tokens
        self._padding += num_padding
        self._bar.update(self._task, completed=self._done, line=self.line())
        now = time.monotonic()
        if self._bar.disable and (now - self._reported >= REPORT_SECONDS or self._done >= self._total):
            self._reported = now
            self.notice(f"extract {self.line()}, {self._seconds_left(now):,.0f} s left")

    def stop(self) -> None:
        """Take the bar down."""
        self._bar.stop()

    def line(self) -> str:
        """Return tokens done, tokens a second of this run, and the share of padding in what was computed."""
        computed = self._done - self._first
        rate = computed / max(time.monotonic() - self._started, 1e-9)
        share = self._padding / max(computed + self._padding, 1)
        return f"{self._done:,}/{self._total:,} tokens, {rate:,.0f} tokens/s, {share:.0%} padding"

    def _seconds_left(self, now: float) -> float:
        computed = max(self._done - self._first, 1)
        return (self._total - self._done) * (now - self._started) / computed
