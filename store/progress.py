"""A bar over bytes, for commands that read a whole cache."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

REPORT_SECONDS = 10.0
MIB = 2**20

Advance = Callable[[int], None]
Bar = Callable[[str, int], AbstractContextManager[Advance]]


def no_bar(_title: str, _total_bytes: int) -> AbstractContextManager[Advance]:
    """Show nothing."""
    return nullcontext(lambda _: None)


@contextmanager
def byte_bar(title: str, total_bytes: int) -> Iterator[Advance]:
    """Show progress on stderr: a bar on a terminal, elsewhere a line every ten seconds.

    Gives a function that takes the bytes done since its last call.
    """
    from rich.console import Console  # noqa: PLC0415 - only where it is shown
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415
    from rich.progress import TransferSpeedColumn as SpeedColumn  # noqa: PLC0415

    console = Console(file=sys.stderr, soft_wrap=True, highlight=False)
    columns = [TextColumn(title), BarColumn(), DownloadColumn(), SpeedColumn(), TimeRemainingColumn()]
    done, reported = 0, time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as shown:
        task = shown.add_task(title, total=total_bytes)

        def advance(num_bytes: int) -> None:
            nonlocal done, reported
            done += num_bytes
            shown.update(task, completed=done)
            if shown.disable and time.monotonic() - reported >= REPORT_SECONDS:
                reported = time.monotonic()
                console.print(f"{title}: {done / MIB:,.0f} of {total_bytes / MIB:,.0f} MiB", markup=False)

        yield advance
