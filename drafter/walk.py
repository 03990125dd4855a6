"""The rule that counts accepted drafts, in one place: a row walked as greedy decoding would walk it.

Plain Python over token ids: the drafts may come from a drafter, an n-gram or a test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import ConfigError

Runs = tuple[tuple[int, int], ...]
DraftFn = Callable[[Sequence[tuple[int, int]]], Sequence[Sequence[int]]]
"""From (row, anchor) pairs, one per row at most, to B-1 drafts each. A draft of -1 matches nothing."""


@dataclass(frozen=True)
class WalkRow:
    """A row to walk: its token ids and the runs of supervised tokens, as (first, one past the last)."""

    tokens: Sequence[int]
    runs: Runs

    @classmethod
    def of(cls, tokens: Sequence[int], loss_mask: Sequence[bool | int]) -> WalkRow:
        """Return the row with the runs of its mask."""
        if len(tokens) != len(loss_mask):
            raise ConfigError(f"a row has {len(tokens)} tokens and {len(loss_mask)} mask values")
        return cls(tokens, supervised_runs(loss_mask))


@dataclass(frozen=True)
class RowWalk:
    """One entry per verification: its anchor, the drafts accepted, the tokens emitted."""

    anchors: list[int]
    accepted: list[int]
    emitted: list[int]

    @property
    def verifications(self) -> int:
        """How many blocks were verified."""
        return len(self.anchors)

    @property
    def tokens(self) -> int:
        """How many tokens were emitted: the supervised tokens after the first of each run."""
        return sum(self.emitted)

    @property
    def tau(self) -> float:
        """Tokens per verification of this row; nan for a row without any."""
        return self.tokens / self.verifications if self.anchors else float("nan")


def supervised_runs(loss_mask: Sequence[bool | int]) -> Runs:
    """Return the runs of true values of at least two tokens: a shorter one has no eligible anchor."""
    runs = []
    first = None
    for position, value in enumerate([*loss_mask, False]):
        if value and first is None:
            first = position
        elif not value and first is not None:
            if position - first >= 2:
                runs.append((first, position))
            first = None
    return tuple(runs)


def eligible_anchors(runs: Runs) -> list[int]:
    """Return every position a with loss_mask[a] and loss_mask[a+1]."""
    return [anchor for first, last in runs for anchor in range(first, last - 1)]


def count_accepted(drafts: Sequence[int], tokens: Sequence[int], anchor: int, end: int) -> int:
    """Return the longest prefix of `drafts` equal to the tokens after `anchor`, none of them at or past `end`."""
    limit = min(len(drafts), end - 1 - anchor)
    accepted = 0
    while accepted < limit and drafts[accepted] == tokens[anchor + 1 + accepted]:
        accepted += 1
    return accepted


def walk_rows(draft: DraftFn, rows: Sequence[WalkRow]) -> list[RowWalk]:
    """Walk all rows in lockstep, one anchor per unfinished row and call of `draft`.

    Each run of supervised tokens starts at its first token (the target's own), goes on at anchor + accepted + 1 and
    stops where no token is left to draft. A verification emits accepted + 1 tokens, or what is left of the run.
    """
    walks = [RowWalk([], [], []) for _ in rows]
    states = {index: (0, row.runs[0][0]) for index, row in enumerate(rows) if row.runs}
    while states:
        pairs = [(index, anchor) for index, (_, anchor) in states.items()]
        drafts = draft(pairs)
        if len(drafts) != len(pairs):
            raise ConfigError(f"{len(pairs)} blocks were asked for, {len(drafts)} drafted")
        for (index, anchor), block in zip(pairs, drafts, strict=True):
            row, walk = rows[index], walks[index]
            run = states[index][0]
            end = row.runs[run][1]
            accepted = count_accepted(block, row.tokens, anchor, end)
            walk.anchors.append(anchor)
            walk.accepted.append(accepted)
            walk.emitted.append(min(accepted + 1, end - 1 - anchor))
            following = anchor + accepted + 1
            if following + 1 < end:
                states[index] = (run, following)
            elif run + 1 < len(row.runs):
                states[index] = (run + 1, row.runs[run + 1][0])
            else:
                del states[index]
    return walks


def micro_tau(walks: Sequence[RowWalk]) -> float:
    """All tokens over all verifications; nan without any."""
    verifications = sum(walk.verifications for walk in walks)
    return sum(walk.tokens for walk in walks) / verifications if verifications else float("nan")


def macro_tau(walks: Sequence[RowWalk]) -> float:
    """The mean of the rows' means, over rows with a verification; nan without any."""
    means = [walk.tau for walk in walks if walk.verifications]
    return sum(means) / len(means) if means else float("nan")


def acceptance_rates(walks: Sequence[RowWalk], block_size: int) -> list[float]:
    """Return, for k = 1..B-1, the share of verifications that accepted slot k; nan without any."""
    accepted = [count for walk in walks for count in walk.accepted]
    if not accepted:
        return [float("nan")] * (block_size - 1)
    return [sum(count >= slot for count in accepted) / len(accepted) for slot in range(1, block_size)]
