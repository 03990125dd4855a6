"""Several processes on one extraction.

Each reads the corpus, loads the target, and claims shards of the same cache (store/claims.py); batches follow from the
plan, so whoever computes a shard writes the same bytes. Nothing else is shared: workers may as well be started by
hand, by torchrun, or on other machines that see the same folder.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..errors import DflashError
from .config import ExtractConfig

PARENT_POLL_SECONDS = 0.5


@contextmanager
def started_workers(config: ExtractConfig, run: Callable[[ExtractConfig], object]) -> Iterator[Callable[[], list[str]]]:
    """Start `num_workers - 1` processes that run the same extraction; they end with this block.

    The CPU's threads are divided among the workers, this one included, while they run.

    Args:
        config: the extraction.
        run: what a worker calls with its own settings.

    Yields:
        A function that returns a line for each worker that has failed.
    """
    threads = torch.get_num_threads()
    share = max(1, threads // config.num_workers)
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(
            target=_work,
            args=(config.for_worker(number), run, share, os.getpid()),
            name=f"worker {number}",
            daemon=True,
        )
        for number in range(1, config.num_workers)
    ]

    def failures() -> list[str]:
        return [
            f"{worker.name} of {config.num_workers} failed (exit code {worker.exitcode}): the others did its work"
            for worker in workers
            if worker.exitcode
        ]

    try:
        if workers:
            torch.set_num_threads(share)
        for worker in workers:
            worker.start()
        yield failures
    finally:
        torch.set_num_threads(threads)
        for worker in workers:
            if worker.pid is not None:
                worker.terminate()
                worker.join()


def _work(config: ExtractConfig, run: Callable[[ExtractConfig], object], num_threads: int, parent: int) -> None:
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(num_threads)
    try:
        run(config)
    except DflashError as error:
        print(f"dflash: worker {config.worker}: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
        sys.exit(1)


def _leave_with(parent: int) -> None:
    """End this process when its parent is gone: a killed extraction leaves nobody behind."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_SECONDS)
    os._exit(1)
