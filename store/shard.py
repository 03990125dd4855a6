"""Rows into the files of one shard: checked against the plan, joined back to back, written, measured.

T tokens of a row, N tokens of the shard, H hidden, K top tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import CacheMismatch
from .arrays import STORED_DTYPE, shard_schema
from .decode import Array
from .encode import create_group, write_array
from .layout import STATS, IntArray, states_name
from .plan import Plan, count_anchors, hash_prompt
from .record import LayerStats, ShardRecord, record_files
from .rows import TORCH_DTYPES, Row, as_stored
from .stats import ChannelSums, measure, sums_bytes


def order_rows(plan: Plan, shard: int, rows: list[Row], dropped: Mapping[str, list[str]]) -> list[Row]:
    """Return a shard's rows in the order of the plan, each checked against it.

    Raises:
        CacheMismatch: a row is missing, unknown, doubled, or not what the plan says.
    """
    by_id = {row.id: row for row in rows}
    gone = [row_id for ids in dropped.values() for row_id in ids]
    found = [row.id for row in rows] + gone
    expected = [plan.row_ids[index] for index in plan.shard_slice(shard)]
    if len(set(found)) != len(found) or set(found) != set(expected):
        odd = sorted(set(found) ^ set(expected)) or sorted({name for name in found if found.count(name) > 1})
        raise CacheMismatch(
            f"shard {shard}: expected each of its {len(expected)} planned rows once, stored or dropped; "
            f"row {odd[0]!r} is not"
        )
    ordered = []
    for index in plan.shard_slice(shard):
        row = by_id.get(plan.row_ids[index])
        if row is not None:
            check_row(plan, index, row)
            ordered.append(row)
    return ordered


def check_row(plan: Plan, index: int, row: Row) -> None:
    """Check one row against the plan.

    Raises:
        CacheMismatch: a tensor has another shape, dtype or range, or the tokens are not the planned ones.
    """
    identity = plan.identity
    num_tokens, top_k = int(plan.num_tokens[index]), identity.top_k
    state = ([num_tokens, plan.hidden_size], TORCH_DTYPES[identity.dtype])
    wanted: dict[str, tuple[list[int], torch.dtype]] = {
        "tokens": ([num_tokens], torch.int32),
        "loss_mask": ([num_tokens], torch.bool),
        "top_ids": ([num_tokens, top_k], torch.int32),
        "top_logprobs": ([num_tokens, top_k], torch.float32),
    }
    tensors: dict[str, Tensor] = {name: getattr(row, name) for name in wanted}
    if sorted(row.states) != sorted(identity.layer_ids):
        raise CacheMismatch(f"row {row.id}: states of layers {sorted(row.states)}, planned {list(identity.layer_ids)}")
    if (row.final is not None) != identity.keep_final:
        raise CacheMismatch(f"row {row.id}: the final state must be there exactly where keep_final is set")
    for layer, states in row.states.items():
        wanted[states_name(layer)], tensors[states_name(layer)] = state, states
    if row.final is not None:
        wanted["final"], tensors["final"] = state, row.final
    for name, (shape, dtype) in wanted.items():
        tensor = tensors[name]
        if list(tensor.shape) != shape or tensor.dtype != dtype:
            raise CacheMismatch(
                f"row {row.id}: {name}: expected {shape} {dtype}, found {list(tensor.shape)} {tensor.dtype}"
            )
    if int(row.top_ids.min()) < 0 or int(row.top_ids.max()) >= plan.vocab_size or int(row.tokens.min()) < 0:
        raise CacheMismatch(f"row {row.id}: token ids outside 0..{plan.vocab_size - 1}")
    prompt = row.tokens[: int(plan.num_prompt_tokens[index])].numpy()
    if hash_prompt(prompt) != plan.prompt_hash[index]:
        raise CacheMismatch(f"row {row.id}: its prompt is not the planned one")
    if count_anchors(row.loss_mask.numpy()) != plan.num_anchors[index]:
        raise CacheMismatch(f"row {row.id}: its loss mask is not the planned one")


def write_shard_files(
    directory: Path, plan: Plan, shard: int, rows: list[Row], dropped: Mapping[str, list[str]]
) -> ShardRecord:
    """Write a shard's arrays and statistics into a folder, and return its record.

    Memory: one array at a time is joined, so the peak is the rows and one layer of the shard. Joined with numpy, in
    one thread: extraction keeps torch's threads busy, and two at once on a core cost both.
    """
    identity = plan.identity
    lengths = np.asarray([len(row.tokens) for row in rows], dtype=np.int64)
    ids = [row.id.encode() for row in rows]
    num_tokens = int(lengths.sum())
    schema = shard_schema(identity, plan.hidden_size, num_tokens, len(rows), sum(map(len, ids)))
    group = create_group(directory) if rows else None
    small = _small_arrays(rows, lengths, ids) if rows else {}
    for name, data in small.items():
        write_array(directory, group, schema[name], identity.codec, data)
    stats: dict[int, LayerStats] = {}
    sums: dict[int, ChannelSums] = {}
    for layer in identity.layer_ids:
        parts = [as_stored(row.states[layer]) for row in rows]
        states = np.concatenate(parts or [np.zeros((0, plan.hidden_size), dtype=STORED_DTYPE[identity.dtype])])
        stats[layer], sums[layer] = measure(states)
        if rows:
            write_array(directory, group, schema[states_name(layer)], identity.codec, states)
    if identity.keep_final and rows:
        final = np.concatenate([as_stored(row.final) for row in rows if row.final is not None])
        write_array(directory, group, schema["final"], identity.codec, final)
    (directory / STATS).write_bytes(sums_bytes(sums))
    return ShardRecord(
        shard=shard,
        num_rows=len(rows),
        num_tokens=num_tokens,
        dropped={reason: sorted(names) for reason, names in sorted(dropped.items()) if names},
        files=record_files(directory),
        layers=stats,
    )


def _small_arrays(rows: list[Row], lengths: IntArray, ids: list[bytes]) -> dict[str, Array]:
    id_lengths = np.asarray([len(name) for name in ids], dtype=np.int64)
    return {
        "tokens": np.concatenate([row.tokens.numpy() for row in rows]),
        "loss_mask": np.concatenate([row.loss_mask.numpy() for row in rows]).astype(np.uint8),
        "row_offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "row_ids": np.frombuffer(b"".join(ids), dtype=np.uint8),
        "row_id_offsets": np.concatenate([[0], np.cumsum(id_lengths)]).astype(np.int64),
        "top_ids": np.concatenate([row.top_ids.numpy() for row in rows]),
        "top_logprobs": np.concatenate([row.top_logprobs.numpy() for row in rows]),
    }
