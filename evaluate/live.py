"""Live decoding: a drafter beside its target, prompt by prompt, against plain decoding in the same run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..drafter.checkpoint import LoadedDrafter, load_drafter
from ..drafter.walk import RowWalk, micro_tau
from ..errors import ConfigError, counted
from ..store import TargetHead
from ..store.durable import write_atomic
from ..target import Target, TargetConfig, end_tokens, load_target
from ..target.decode import TargetDecoder, check_decoding
from ..target.prompts import Prompt, Prompts, read_prompts
from .figures import walk_figures
from .fit import check_sizes
from .locate import locate_drafter
from .lossless import compare
from .measure import FrozenHead
from .speculate import Decoded, Limits, Speculator, decode_plainly, sample_at
from .trees import check_budgets

REPORT_SECONDS = 10.0
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class LiveConfig:
    """One live evaluation.

    Attributes:
        drafter: a drafter's folder in z-lab's layout, a checkpoint's, or a run's.
        target: folder or name of the target it was trained for.
        prompts: a prompts file (target/prompts.py says what it may hold).
        rows: stop after so many prompts; None: all.
        max_new_tokens: limit of a reply, the target's own limit of length permitting.
        dtype: of the target; None: the checkpoint's. The drafter computes in float32.
        attention: implementation of the target's attention.
        save_rows: JSON lines file for what was decoded, a corpus for `dflash extract`.
        temperature: 0 is greedy; above, tokens are sampled from the target at this temperature.
        seed: of the sampling.
        tree_budgets: also decode with trees of so many nodes.
        device: auto, cpu, cuda or cuda:N, for both models.

    Raises:
        ConfigError: a value is out of its range.
    """

    drafter: Path
    target: str
    prompts: Path
    rows: int | None = None
    max_new_tokens: int = 256
    dtype: str | None = None
    attention: str = "sdpa"
    save_rows: Path | None = None
    temperature: float = 0.0
    seed: int = 0
    tree_budgets: tuple[int, ...] = ()
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.max_new_tokens < 2 or (self.rows is not None and self.rows < 1):
            raise ConfigError(f"rows {self.rows}, max-new-tokens {self.max_new_tokens}: expected at least 1 and 2")
        if not 0 <= self.temperature < 100:
            raise ConfigError(f"temperature {self.temperature}: expected 0 to 100")
        if self.temperature and self.tree_budgets:
            raise ConfigError("a tree is verified greedily: use --tree-budget without --temperature")
        object.__setattr__(self, "tree_budgets", check_budgets(self.tree_budgets))


def run_live(config: LiveConfig, say: Say) -> dict[str, Any]:
    """Decode a prompts file with and without the drafter.

    Args:
        config: see `LiveConfig`.
        say: takes lines for people: progress and notices.

    Returns:
        The JSON object of `dflash evaluate --target --json`: rows, verifications, tokens, tau, acceptance_rate,
        lossless, differences, tokens_per_second, baseline_tokens_per_second, speedup, tree, sources, and what was
        evaluated.

    Raises:
        CheckpointError, TargetError, CorpusError: drafter, target or prompts cannot be read.
        ConfigError: they do not fit each other.
    """
    started = time.perf_counter()
    _check_place(config.save_rows)
    directory = locate_drafter(config.drafter)
    drafter = load_drafter(directory)
    target = load_target(
        TargetConfig(name=config.target, dtype=config.dtype, attention=config.attention, device=config.device)
    )
    for notice in target.notices:
        say(notice)
    check_sizes(
        drafter.config,
        f"target {target.name}",
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
    )
    check_decoding(target)
    if config.tree_budgets:
        TargetDecoder(target).require_branching()
    prompts = _read_prompts(config, target, say)
    speculator = make_speculator(drafter, target)
    say(f"{directory}: {counted(len(prompts.prompts), 'prompt')} of {config.prompts}, target {config.target}")
    rows = _decode_all(config, speculator, prompts.prompts, say)
    if config.save_rows:
        save_rows(config.save_rows, prompts.prompts, [row.chain for row in rows])
    return {
        "drafter": str(directory),
        "target": config.target,
        "target_dtype": target.description.dtype,
        "prompts": str(config.prompts),
        "skipped": prompts.skipped,
        "block_size": drafter.config.block_size,
        "temperature": config.temperature,
        "max_new_tokens": config.max_new_tokens,
        **_summary(rows, prompts.prompts, drafter.config.block_size, target.dtype, config.temperature),
        "saved_rows": str(config.save_rows) if config.save_rows else None,
        "seconds": time.perf_counter() - started,
    }


def make_speculator(drafter: LoadedDrafter, target: Target) -> Speculator:
    """Put the drafter, and the target's head in the drafter's dtype, on the target's device."""
    embed_tokens, lm_head, norm, norm_eps = target.head_tensors()
    model = drafter.model.to(target.device)
    head = TargetHead(embed_tokens=embed_tokens, lm_head=lm_head, norm=norm, norm_eps=norm_eps)
    return Speculator(target, model, FrozenHead.of(head, model.fc.weight))


def _check_place(path: Path | None) -> None:
    """Refuse a file that cannot be written, before hours of decoding rather than after."""
    if path is None:
        return
    if path.exists():
        raise ConfigError(f"{path}: it exists already; move it, or give --save-rows another name")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path}: its folder {path.parent} is not there or cannot be written; give another place")


def _read_prompts(config: LiveConfig, target: Target, say: Say) -> Prompts:
    longest = target.description.max_length
    prompts = read_prompts(
        config.prompts,
        target.tokenizer,
        vocab_size=target.vocab_size,
        max_tokens=None if longest is None else longest - 2,
        limit=config.rows,
    )
    for notice in prompts.notices(config.prompts):
        say(notice)
    return prompts


@dataclass(frozen=True, eq=False)
class _Row:
    """One prompt decoded plainly, with the chain of drafts, and with each tree."""

    plain: Decoded
    chain: Decoded
    trees: dict[int, Decoded]


def _decode_all(config: LiveConfig, speculator: Speculator, prompts: Sequence[Prompt], say: Say) -> list[_Row]:
    target, eos_ids = speculator.target, end_tokens(speculator.target)
    source = torch.Generator().manual_seed(config.seed)
    room = target.description.max_length
    rows: list[_Row] = []
    started = spoke = time.perf_counter()
    for prompt in prompts:
        most = config.max_new_tokens if room is None else min(config.max_new_tokens, room - len(prompt.ids))
        limits = Limits(max_new_tokens=most, eos_ids=eos_ids)
        if config.temperature:
            plain = decode_plainly(target, prompt.ids, limits, sample_at(config.temperature, source))
            rows.append(_Row(plain, speculator.sampled(prompt.ids, limits, config.temperature, source), {}))
        else:
            plain = decode_plainly(target, prompt.ids, limits)
            trees = {budget: speculator.greedy(prompt.ids, limits, budget) for budget in config.tree_budgets}
            rows.append(_Row(plain, speculator.greedy(prompt.ids, limits), trees))
        now = time.perf_counter()
        if now - spoke > REPORT_SECONDS or len(rows) == len(prompts):
            spoke = now
            left = int((len(prompts) - len(rows)) * (now - started) / len(rows))
            tau = micro_tau([row.chain.walk for row in rows])
            say(f"{len(rows):,}/{len(prompts):,} prompts  tau {tau:.3f}  {left // 60}:{left % 60:02d} left")
    return rows


def _summary(
    rows: Sequence[_Row], prompts: Sequence[Prompt], block_size: int, dtype: torch.dtype, temperature: float
) -> dict[str, Any]:
    chains, plains = [row.chain for row in rows], [row.plain for row in rows]
    if not any(chain.walk.anchors for chain in chains):
        raise ConfigError(
            f"all {len(rows)} replies ended with their first token, so nothing was drafted: check that the prompts "
            "carry the target's chat template"
        )
    ids = [prompt.id for prompt in prompts]
    plain_speed = _tokens_per_second(plains)

    def figures(found: Sequence[Decoded]) -> dict[str, Any]:
        speed = _tokens_per_second(found)
        equal = {"lossless": None} if temperature else compare(ids, plains, found, dtype)
        walks = walk_figures([row.walk for row in found], block_size)
        return {**walks, **equal, "tokens_per_second": speed, "speedup": speed / plain_speed}

    sources: dict[str, list[RowWalk]] = {}
    for prompt, chain in zip(prompts, chains, strict=True):
        sources.setdefault(prompt.source, []).append(chain.walk)
    return {
        **figures(chains),
        "baseline_tokens_per_second": plain_speed,
        "one_token_rows": sum(not chain.walk.verifications for chain in chains),
        "sources": {
            name: walk_figures(walks, block_size) for name, walks in sources.items() if any(w.anchors for w in walks)
        },
        "tree": {str(budget): figures([row.trees[budget] for row in rows]) for budget in rows[0].trees},
    }


def _tokens_per_second(rows: Sequence[Decoded]) -> float:
    return sum(len(row.tokens) for row in rows) / sum(row.seconds for row in rows)


def save_rows(path: Path, prompts: Sequence[Prompt], rows: Sequence[Decoded]) -> None:
    """Write decoded rows as JSON lines that `dflash extract` takes: id, source, prompt_ids, completion_ids.

    Also why each ended and how many verifications it took. Written beside and renamed.
    """
    lines = [
        {
            "id": prompt.id,
            "source": prompt.source,
            "prompt_ids": prompt.ids,
            "completion_ids": row.tokens,
            "finish_reason": row.finish_reason,
            "verifications": row.walk.verifications,
        }
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
