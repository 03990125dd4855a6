"""Synthetic caches: rows whose every bit follows from a seed, by numpy's raw PCG64, which never changes."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_pipeline.store import CacheWriter, CorpusFile, Identity, Manifest, Plan, Row, TargetHead, assign_rows
from dflash_pipeline.store import writer as writer_module
from dflash_pipeline.store.plan import count_anchors, hash_prompt

HIDDEN, VOCAB, TOP_K = 8, 50, 3
LAYER_IDS = (1, 4)
LENGTHS = (7, 12, 3, 20, 9, 5, 16, 11)
VERSIONS = {name: version(name) for name in ("numcodecs", "safetensors", "zarr")}
TORCH = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def identity(**changes: Any) -> Identity:
    settings: dict[str, Any] = {
        "target_name": "synthetic",
        "target_revision": None,
        "target_fingerprint": "a" * 32,
        "tokenizer_hash": "b" * 32,
        "template_hash": "c" * 32,
        "corpus": (CorpusFile(name="rows.jsonl", sha256="0" * 64, num_bytes=123),),
        "layer_ids": LAYER_IDS,
        "dtype": "bfloat16",
        "attention": "sdpa",
        "max_length": None,
        "codec": "lossless",
        "top_k": TOP_K,
        "keep_final": False,
        "batch_tokens": 40,
        "shard_tokens": 30,
        "limit_rows": None,
        "limit_tokens": None,
    }
    return Identity(**{**settings, **changes})


def bits(seed: int, count: int) -> np.ndarray:
    return np.random.PCG64(seed).random_raw(max(count, 1))[:count]


def state_bits(seed: int, shape: tuple[int, int], dtype: str, *, any_bits: bool = False) -> torch.Tensor:
    """Values near 1 by default; with `any_bits` every pattern, NaN payloads and infinities included."""
    raw = bits(seed, shape[0] * shape[1]).reshape(shape)
    if dtype == "float32":
        pattern = (raw >> np.uint64(32)).astype(np.uint32)
        pattern = pattern if any_bits else (pattern & np.uint32(0x80FFFFFF)) | np.uint32(0x3F000000)
        return torch.from_numpy(pattern.view(np.float32))
    pattern16 = (raw >> np.uint64(48)).astype(np.uint16)
    pattern16 = pattern16 if any_bits else (pattern16 & np.uint16(0x80FF)) | np.uint16(0x3F00)
    return torch.from_numpy(pattern16).view(torch.bfloat16)


def make_rows(
    lengths: Sequence[int] = LENGTHS,
    *,
    layer_ids: Sequence[int] = LAYER_IDS,
    dtype: str = "bfloat16",
    hidden: int = HIDDEN,
    top_k: int = TOP_K,
    final: bool = False,
    any_bits: bool = False,
    seed: int = 0,
) -> list[Row]:
    rows = []
    for index, length in enumerate(lengths):
        base = 1000 * (seed + 1) + 10 * index
        states = {
            layer: state_bits(base + 100_000 * (place + 1), (length, hidden), dtype, any_bits=any_bits)
            for place, layer in enumerate(layer_ids)
        }
        top = bits(base + 1, length * top_k).reshape(length, top_k)
        rows.append(
            Row(
                id=f"row-{seed}-{index}-é",
                tokens=torch.from_numpy((bits(base, length) % np.uint64(VOCAB)).astype(np.int32)),
                loss_mask=torch.arange(length) >= length // 3,
                states=states,
                top_ids=torch.from_numpy((top % np.uint64(VOCAB)).astype(np.int32)),
                top_logprobs=torch.from_numpy(-(top >> np.uint64(44)).astype(np.float32) / 65536),
                final=state_bits(base + 2, (length, hidden), dtype, any_bits=any_bits) if final else None,
            )
        )
    return rows


def make_plan(rows: Sequence[Row], ident: Identity, *, hidden: int = HIDDEN) -> tuple[Plan, list[Row]]:
    """Return the plan of rows, and the rows in its order."""
    order, shard_rows = assign_rows([len(row.tokens) for row in rows], ident.shard_tokens)
    ordered = [rows[index] for index in order]
    prompts = [len(row.tokens) // 3 for row in ordered]
    plan = Plan(
        identity=ident,
        hidden_size=hidden,
        vocab_size=VOCAB,
        row_ids=[row.id for row in ordered],
        num_tokens=np.asarray([len(row.tokens) for row in ordered]),
        num_prompt_tokens=np.asarray(prompts),
        prompt_hash=[hash_prompt(row.tokens[:n].numpy()) for row, n in zip(ordered, prompts, strict=True)],
        num_anchors=np.asarray([count_anchors(row.loss_mask.numpy()) for row in ordered]),
        shard_rows=shard_rows,
        skipped={"reply too short": 2},
    )
    return plan, ordered


def make_head(*, tied: bool = True, hidden: int = HIDDEN) -> TargetHead:
    embed = state_bits(77, (VOCAB, hidden), "float32")
    return TargetHead(
        embed_tokens=embed,
        lm_head=None if tied else state_bits(78, (VOCAB, hidden), "float32"),
        norm=state_bits(79, (1, hidden), "float32")[0],
        norm_eps=1e-6,
    )


def target_files(directory: Path) -> None:
    (directory / "config.json").write_text('{"hidden_size": 8}', encoding="utf-8")
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")


def open_writer(cache: Path, plan: Plan, *, hidden: int = HIDDEN) -> CacheWriter:
    return CacheWriter.create_or_resume(cache, plan, make_head(hidden=hidden), target_files, VERSIONS)


def write_missing(writer: CacheWriter, rows: Sequence[Row], dropped: dict[str, str] | None = None) -> None:
    """Write every missing shard; `dropped` maps row ids to reasons."""
    by_id, dropped = {row.id: row for row in rows}, dropped or {}
    for shard in writer.missing_shards:
        ids = [writer.plan.row_ids[index] for index in writer.plan.shard_slice(shard)]
        reasons: dict[str, list[str]] = {}
        for name in ids:
            if name in dropped:
                reasons.setdefault(dropped[name], []).append(name)
        writer.write_shard(shard, [by_id[name] for name in ids if name not in dropped], reasons)


def write_cache(
    cache: Path, rows: Sequence[Row] | None = None, dropped: dict[str, str] | None = None, **changes: Any
) -> Manifest:
    """Write a whole cache; `changes` go to the identity."""
    ident = identity(**changes)
    if rows is None:
        rows = make_rows(dtype=ident.dtype, final=ident.keep_final, layer_ids=ident.layer_ids, top_k=ident.top_k)
    hidden = rows[0].states[ident.layer_ids[0]].shape[1]
    plan, ordered = make_plan(rows, ident, hidden=hidden)
    with open_writer(cache, plan, hidden=hidden) as writer:
        write_missing(writer, ordered, dropped)
        return writer.finish()


def golden_rows(dtype: str) -> list[Row]:
    return make_rows([5, 9, 4], dtype=dtype, final=True, any_bits=True)


def write_golden(cache: Path, dtype: str) -> Manifest:
    """Write the cache whose bytes are kept in golden/; never change it."""
    rows = golden_rows(dtype)
    return write_cache(cache, rows, {rows[2].id: "NaN states"}, dtype=dtype, keep_final=True, shard_tokens=12)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Tell whether two tensors have equal dtype, shape and bits: NaN payloads and the sign of zero count."""
    kind = {torch.bfloat16: torch.int16, torch.float32: torch.int32}.get(left.dtype, left.dtype)
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left.view(kind), right.view(kind))


def same_rows(left: Row, right: Row) -> bool:
    pairs = [(getattr(left, name), getattr(right, name)) for name in ("tokens", "loss_mask", "top_ids", "top_logprobs")]
    pairs += [(left.states[layer], right.states[layer]) for layer in left.states]
    if left.final is not None and right.final is not None:
        pairs.append((left.final, right.final))
    return (
        left.id == right.id
        and left.states.keys() == right.states.keys()
        and (left.final is None) == (right.final is None)
        and all(same_bits(a, b) for a, b in pairs)
    )


def content(cache: Path) -> dict[str, bytes]:
    """Every file of a cache but the lock, by its path."""
    return {
        path.relative_to(cache).as_posix(): path.read_bytes()
        for path in sorted(cache.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def write_and_die(cache: Path, die_after: int | None, *, in_the_middle: bool = False) -> None:
    """Write the default cache in another process; die without any clean-up after so many shards, or in the next."""
    rows = make_rows()
    plan, ordered = make_plan(rows, identity())
    writer = open_writer(cache, plan)
    by_id = {row.id: row for row in ordered}
    for done, shard in enumerate(writer.missing_shards):
        if done == die_after:
            if not in_the_middle:
                os._exit(9)
            writer_module.commit_dir = lambda *_: os._exit(9)  # type: ignore[assignment]
        writer.write_shard(shard, [by_id[plan.row_ids[index]] for index in plan.shard_slice(shard)], {})
    writer.finish()
    writer.close()


def in_another_process(function: Callable[..., object], *arguments: object, kill_after: float | None = None) -> int:
    """Call a function in a forked process, killed after some seconds where that is asked for; return its exit code."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    if kill_after is not None:
        time.sleep(kill_after)
        process.kill()
    process.join(600)
    assert process.exitcode is not None
    return process.exitcode
