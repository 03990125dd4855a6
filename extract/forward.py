"""One planned shard through the target: batches in, whole rows out, faulty rows set apart.

R rows, T tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..errors import TargetError, counted
from ..store import Plan, Row
from ..target import Capture, Target, capture
from .progress import Progress
from .rows import CorpusRow


def compute_shard(
    target: Target, plan: Plan, rows: Mapping[int, CorpusRow], shard: int, progress: Progress
) -> tuple[list[Row], dict[str, list[str]]]:
    """Run the planned batches of one shard.

    Args:
        rows: the shard's rows at least, by their place in the plan.

    Returns:
        The shard's sound rows in the plan's order, and the ids of the others by reason. All in memory.

    Raises:
        TargetError: a batch does not fit into the device's memory.
    """
    found: dict[int, Row] = {}
    faults: dict[int, str] = {}
    for batch in plan.batches(shard):
        captured = _capture_batch(target, plan, [rows[index] for index in batch])
        for place, index in enumerate(batch):
            row = _take_row(captured, place, rows[index])
            fault = find_fault(row)
            if fault is None:
                found[index] = row
            else:
                faults[index] = fault
        num_tokens = sum(rows[index].num_tokens for index in batch)
        progress.advance(num_tokens, len(batch) * plan.batch_pad_length(batch) - num_tokens)
    dropped: dict[str, list[str]] = {}
    for index in sorted(faults):
        dropped.setdefault(faults[index], []).append(rows[index].id)
    return [found[index] for index in sorted(found)], dropped


def find_fault(row: Row) -> str | None:
    """Return why a captured row must not be stored, or None: a value that is not finite, or an all-zero state.

    A healthy model never returns an exact zero vector for a token; a broken kernel, a missing weight or an overflow
    does.
    """
    for state in [*row.states.values(), *([] if row.final is None else [row.final])]:
        if not bool(torch.isfinite(state).all()):
            return "non-finite state"
        if not bool(state.any(dim=-1).all()):
            return "all-zero state"
    return None if bool(torch.isfinite(row.top_logprobs).all()) else "non-finite logits"


def pad_batch(rows: Sequence[Tensor]) -> Tensor:
    """Return rows of token ids [T_i] as one int64 tensor [R, T], padded on the right with id 0."""
    return torch.nn.utils.rnn.pad_sequence([row.long() for row in rows], batch_first=True)


def _capture_batch(target: Target, plan: Plan, rows: Sequence[CorpusRow]) -> Capture:
    identity = plan.identity
    try:
        return capture(
            target,
            pad_batch([torch.from_numpy(row.input_ids) for row in rows]),
            [row.num_tokens for row in rows],
            layer_ids=identity.layer_ids,
            top_k=identity.top_k,
            keep_final=identity.keep_final,
        )
    except torch.OutOfMemoryError as error:
        longest = max(row.num_tokens for row in rows)
        raise TargetError(
            f"a batch of {counted(len(rows), 'row')} of at most {longest} tokens does not fit into the memory of "
            f"{target.device}: use a smaller --batch-tokens than {identity.batch_tokens} or a smaller --max-length, "
            "and another --out"
        ) from error


def _take_row(captured: Capture, place: int, row: CorpusRow) -> Row:
    """Copy one row out of a batch, so that the batch and its padding can be freed."""
    length = row.num_tokens
    return Row(
        id=row.id,
        tokens=torch.from_numpy(row.input_ids),
        loss_mask=torch.from_numpy(row.loss_mask),
        states={layer_id: states[place, :length].clone() for layer_id, states in captured.states.items()},
        top_ids=captured.top_ids[place, :length].clone(),
        top_logprobs=captured.top_logprobs[place, :length].clone(),
        final=None if captured.final is None else captured.final[place, :length].clone(),
    )
