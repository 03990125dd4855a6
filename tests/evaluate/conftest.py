"""A tiny real drafter with random weights, and rows whose accepted runs are known because the drafter wrote them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_pipeline.drafter.config import DrafterConfig
from dflash_pipeline.drafter.layout import PackLayout
from dflash_pipeline.drafter.model import DFlashDrafter, init_weights
from dflash_pipeline.store import CacheWriter, Row, TargetHead
from dflash_pipeline.store.plan import CorpusFile, Identity, Plan, count_anchors, hash_prompt

LAYER_IDS = (1, 4, 6)
CONTEXT_IDS = (4, 1)
HIDDEN, VOCAB, BLOCK = 32, 90, 8


def drafter_config(**changes: object) -> DrafterConfig:
    settings: dict[str, object] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "block_size": BLOCK,
        "mask_token_id": 89,
        "context_layer_ids": CONTEXT_IDS,
        "num_target_layers": 8,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
    }
    return DrafterConfig(**{**settings, **changes})  # type: ignore[arg-type]


def random_drafter(**changes: object) -> DFlashDrafter:
    model = DFlashDrafter(drafter_config(**changes))
    init_weights(model, torch.Generator().manual_seed(3), std=0.3)
    return model.eval()


def random_head() -> TargetHead:
    source = torch.Generator().manual_seed(5)
    embed, head = torch.randn(VOCAB, HIDDEN, generator=source), torch.randn(VOCAB, HIDDEN, generator=source)
    return TargetHead(embed_tokens=embed, lm_head=head, norm=torch.ones(HIDDEN), norm_eps=1e-6)


@torch.no_grad()
def slow_logits(model: DFlashDrafter, head: TargetHead, states: dict[int, Tensor], anchor: int, token: int) -> Tensor:
    """One block, one anchor at the row's end, plain attention, from the states before it alone: [B-1, V]."""
    context = torch.cat([states[layer][:anchor] for layer in model.config.context_layer_ids], dim=1).float()
    ids = torch.tensor([token] + [model.config.mask_token_id] * (model.config.block_size - 1))
    layout = PackLayout.single_row(anchor, [anchor])
    hidden = model(head.embed_tokens[ids], model.context_features(context), layout, attention="plain")
    return hidden[1:] @ head.head_weight.T


def slow_draft(model: DFlashDrafter, head: TargetHead, states: dict[int, Tensor], anchor: int, token: int) -> list[int]:
    """Return the first choices of that block."""
    drafts: list[int] = slow_logits(model, head, states, anchor, token).argmax(-1).tolist()
    return drafts


def row_with_runs(
    model: DFlashDrafter,
    head: TargetHead,
    prompt: Sequence[int],
    turns: Sequence[Sequence[int]],
    *,
    seed: int,
    row_id: str = "row",
    off_policy: Sequence[int] = (),
) -> Row:
    """Return a row on which the drafter's accepted runs are exactly `turns`, one list per supervised run.

    After each accepted run stands a token that the drafter did not draft. Between turns stand three prompt tokens.
    `top_ids` name the row's own tokens, but for the positions `off_policy`.
    """
    source = torch.Generator().manual_seed(seed)
    length = len(prompt) + sum(sum(turn) + len(turn) + 1 for turn in turns) + 3 * (len(turns) - 1)
    states = {layer: torch.randn(length, HIDDEN, generator=source) for layer in LAYER_IDS}
    tokens, mask = list(prompt), [False] * len(prompt)
    chooser = random.Random(seed)
    for number, turn in enumerate(turns):
        if number:
            tokens += chooser.choices(range(VOCAB - 1), k=3)
        tokens.append(chooser.randrange(VOCAB - 1))
        for accepted in turn:
            drafts = slow_draft(model, head, states, len(tokens) - 1, tokens[-1])
            wrong = drafts[accepted] if accepted < len(drafts) else -1
            tokens += drafts[:accepted]
            tokens.append(chooser.choice([token for token in range(VOCAB - 1) if token != wrong]))
        mask += [False] * (3 if number else 0) + [True] * (sum(turn) + len(turn) + 1)
    top_ids = torch.randint(0, VOCAB, (length, 2), generator=source, dtype=torch.int32)
    top_ids[:-1, 0] = torch.tensor(tokens[1:], dtype=torch.int32)
    for position in off_policy:
        top_ids[position - 1, 0] = (tokens[position] + 1) % VOCAB
    return Row(
        id=row_id,
        tokens=torch.tensor(tokens, dtype=torch.int32),
        loss_mask=torch.tensor(mask),
        states=states,
        top_ids=top_ids,
        top_logprobs=torch.zeros(length, 2),
    )


def make_cache(path: Path, rows: Sequence[Row], head: TargetHead | None = None, *, corpus: str = "a") -> Path:
    """Write a complete cache of the rows, three a shard; the same rows and corpus letter give the same identity."""
    prompts = [row.loss_mask.tolist().index(True) for row in rows]
    identity = Identity(
        target_name="tiny",
        target_revision=None,
        target_fingerprint="0" * 32,
        tokenizer_hash="1" * 32,
        template_hash="2" * 32,
        corpus=(CorpusFile(name="rows.jsonl", sha256=corpus * 64, num_bytes=1),),
        layer_ids=LAYER_IDS,
        dtype="float32",
        attention="sdpa",
        max_length=None,
        codec="lossless",
        top_k=2,
        keep_final=False,
        batch_tokens=64,
        shard_tokens=64,
        limit_rows=None,
        limit_tokens=None,
    )
    plan = Plan(
        identity=identity,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        row_ids=[row.id for row in rows],
        num_tokens=np.array([len(row.tokens) for row in rows]),
        num_prompt_tokens=np.array(prompts),
        prompt_hash=[hash_prompt(row.tokens[:prompt].numpy()) for row, prompt in zip(rows, prompts, strict=True)],
        num_anchors=np.array([count_anchors(row.loss_mask.numpy()) for row in rows]),
        shard_rows=[min(3, len(rows) - start) for start in range(0, len(rows), 3)],
    )

    def target_files(directory: Path) -> None:
        (directory / "config.json").write_text('{"num_hidden_layers": 8}', encoding="utf-8")

    with CacheWriter.create_or_resume(path, plan, head or random_head(), target_files, {}) as writer:
        for shard in writer.missing_shards:
            writer.write_shard(shard, [rows[index] for index in plan.shard_slice(shard)], {})
        writer.finish()
    return path


def many_rows(model: DFlashDrafter, head: TargetHead, count: int = 20, seed: int = 0) -> list[Row]:
    """Rows of random accepted runs, one or two turns each, all prompts different."""
    chooser = random.Random(seed)
    rows = []
    for index in range(count):
        turns = [
            [chooser.randrange(BLOCK) for _ in range(chooser.randint(1, 5))] for _ in range(chooser.choice([1, 1, 2]))
        ]
        prompt = [index % VOCAB, *chooser.choices(range(VOCAB - 1), k=chooser.randint(1, 9))]
        rows.append(row_with_runs(model, head, prompt, turns, seed=seed * 1000 + index, row_id=f"row-{index}"))
    return rows


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The functions of this file, for tests that build their own rows and caches."""
    return SimpleNamespace(
        drafter_config=drafter_config,
        random_drafter=random_drafter,
        row_with_runs=row_with_runs,
        many_rows=many_rows,
        slow_draft=slow_draft,
        slow_logits=slow_logits,
        make_cache=make_cache,
    )


@pytest.fixture(scope="session")
def drafter() -> DFlashDrafter:
    return random_drafter()


@pytest.fixture(scope="session")
def head() -> TargetHead:
    return random_head()


@pytest.fixture(scope="session")
def rows(drafter: DFlashDrafter, head: TargetHead) -> list[Row]:
    return many_rows(drafter, head)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]) -> Path:
    return make_cache(tmp_path_factory.mktemp("cache") / "cache", rows)
