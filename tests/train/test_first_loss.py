"""Why the first losses are high under a tied head, and that the run says so."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from dflash_pipeline.drafter.checkpoint import load_drafter
from dflash_pipeline.examples import embedded_corpus, embedded_target
from dflash_pipeline.extract.config import ExtractConfig
from dflash_pipeline.extract.run import run_extract
from dflash_pipeline.store import open_cache
from dflash_pipeline.train.loop import TrainOptions, run_train
from dflash_pipeline.train.recipes import load_recipe


def first_steps(cache: Path, out: Path) -> tuple[list[str], list[float]]:
    recipe = load_recipe("default", ["num_layers=1", "steps=2", "pack_tokens=300", "anchors_per_pack=30"])
    said: list[str] = []
    run_train(TrainOptions(cache=cache, out=out, recipe=recipe, num_workers=0, device="cpu"), said.append)
    losses = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    return said, losses


def test_under_a_tied_head_the_first_loss_is_the_mask_tokens_own_logit_and_said_to_be(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    corpus, target = (embedded_corpus(),), str(embedded_target())
    run_extract(ExtractConfig(corpus=corpus, target=target, out=cache, device="cpu", limit_rows=30, shard_tokens=2000))
    said, losses = first_steps(cache, tmp_path / "run")
    head = open_cache(cache).head()
    assert head.lm_head is None
    mask = load_drafter(tmp_path / "run").config.mask_token_id
    own = float(head.embed_tokens[mask].norm() / head.embed_tokens.std())
    assert losses[0] > 2 * math.log(len(head.embed_tokens))
    assert losses[0] == pytest.approx(own, rel=0.3)
    assert [line for line in said if f"(logit {own:.0f})" in line]


def test_under_a_head_of_its_own_it_is_not(tiny_cache: Path, tmp_path: Path) -> None:
    said, losses = first_steps(tiny_cache, tmp_path / "run")
    assert losses[0] < 1.3 * math.log(1024)
    assert not [line for line in said if "tied" in line]
    assert [line for line in said if line.startswith("blocks: up to ")]
