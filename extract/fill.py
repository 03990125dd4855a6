"""Filling a planned cache: shard after shard through the target, beside any other workers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ..errors import counted
from ..store import CacheWriter, Plan
from ..target import Target
from .forward import compute_shard
from .progress import Progress
from .rows import CorpusRow


class Reporter:
    """Passes notices on to the progress display and keeps them for the result."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.notices: list[str] = []

    def extend(self, notices: Sequence[str]) -> None:
        """Report more notices."""
        for notice in notices:
            self.notices.append(notice)
            self.progress.notice(notice)


def extract_shards(
    target: Target, plan: Plan, rows: Mapping[int, CorpusRow], writer: CacheWriter, reporter: Reporter
) -> float:
    """Compute and write the missing shards beside any other workers; return the tokens per second of all of them."""

    def found(shard: int) -> None:  # another worker's
        reporter.progress.advance(_shard_tokens(plan, shard), 0)
        reporter.extend(_drop_notices(shard, writer.record(shard).dropped))

    num_tokens = int(plan.num_tokens.sum())
    num_missing = sum(_shard_tokens(plan, shard) for shard in writer.missing_shards)
    started = time.monotonic()
    reporter.progress.start(num_tokens, num_tokens - num_missing)
    try:
        for shard in writer.claim_shards(found, reporter.progress.notice):
            sound, dropped = compute_shard(target, plan, rows, shard, reporter.progress)
            writer.write_shard(shard, sound, dropped)
            reporter.extend(writer.take_notices())
            reporter.extend(_drop_notices(shard, dropped))
    finally:
        reporter.progress.stop()
    return num_missing / max(time.monotonic() - started, 1e-9) if num_missing else 0.0


def _shard_tokens(plan: Plan, shard: int) -> int:
    return sum(int(plan.num_tokens[index]) for index in plan.shard_slice(shard))


def _drop_notices(shard: int, dropped: Mapping[str, Sequence[str]]) -> list[str]:
    return [
        f"shard {shard}: dropped {counted(len(ids), 'row')}: {reason}: {', '.join(ids[:5])}"
        + (", ..." if len(ids) > 5 else "")
        for reason, ids in dropped.items()
    ]
