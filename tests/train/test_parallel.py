"""Several processes train as one: the same losses on one rank, on two, and sharded; a resume on another number."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dflash_pipeline.drafter.checkpoint import load_drafter
from dflash_pipeline.errors import ConfigError
from dflash_pipeline.store import open_cache
from dflash_pipeline.train.data import open_steps
from dflash_pipeline.train.facts import resolve_for, training_rows
from dflash_pipeline.train.loop import TrainOptions, run_train
from dflash_pipeline.train.recipes import load_recipe

SETTINGS = [
    "anchors_per_pack=12",
    "pack_tokens=400",
    "num_layers=2",
    "eval_rows=2",
    "shuffle_tokens=1000",
    "steps=20",
    "packs_per_step=2",
    "eval_every=10",
]


def alone(cache: Path, out: Path, *more: str) -> dict:
    recipe = load_recipe("default", [*SETTINGS, *more])
    result = run_train(TrainOptions(cache=cache, out=out, recipe=recipe, device="cpu"), lambda _line: None)
    assert result is not None
    return result


def on_two_ranks(cache: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "dflash_pipeline.cli", "train", "--cache", str(cache), "--out", str(out), "--json"]
    for setting in [*SETTINGS, *more]:
        command += ["--set", setting]
    command += ["--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one_rank(tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("parallel") / "one"
    alone(tiny_cache, run)
    return run


@pytest.mark.parametrize("more", [(), ("shard=full",)], ids=["ddp", "fsdp"])
def test_two_ranks_have_the_losses_of_one(
    tiny_cache: Path, tmp_path: Path, one_rank: Path, more: tuple[str, ...]
) -> None:
    """Noise is on in neither; packs, anchors and the normaliser are those of the whole step."""
    done = on_two_ranks(tiny_cache, tmp_path / "two", *more)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 2
    assert losses(tmp_path / "two") == pytest.approx(losses(one_rank), rel=1e-5)
    ours, theirs = load_drafter(tmp_path / "two").model, load_drafter(one_rank).model
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert float(((mine - other).norm() / other.norm()).detach()) < 1e-4, name


def test_a_run_of_two_ranks_goes_on_alone(tiny_cache: Path, tmp_path: Path, one_rank: Path) -> None:
    """Ten steps on two ranks, the last ten on one, from the checkpoint that two wrote."""
    run = tmp_path / "run"
    done = on_two_ranks(tiny_cache, run, "checkpoint_every=10")
    assert done.returncode == 0, done.stderr
    (run / "result.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-0000020")
    assert alone(tiny_cache, run, "checkpoint_every=10")["resumed_from"] == 10
    assert losses(run) == pytest.approx(losses(one_rank), rel=1e-5)


def test_ranks_that_do_not_divide_the_packs_are_refused_in_one_line(tiny_cache: Path, tmp_path: Path) -> None:
    done = on_two_ranks(tiny_cache, tmp_path / "run", "packs_per_step=3")
    assert done.returncode != 0
    assert "packs_per_step = 3 cannot be shared by 2 processes" in done.stderr
    assert 'File "' not in done.stderr.split("torch/distributed")[0]
    assert not (tmp_path / "run").exists()


def test_ranks_read_disjoint_shards_and_together_the_packs_of_one(tiny_cache: Path) -> None:
    cache = open_cache(tiny_cache)
    config = resolve_for(load_recipe("default", SETTINGS), cache, None, torch.device("cpu"))
    table = training_rows(cache, config.recipe.heldout_share)
    epoch_shards, seen = [], []
    for rank in (0, 1):
        shards: set[int] = set()
        with open_steps(cache, table, config, first_step=0, num_workers=0, rank=rank, num_ranks=2) as steps:
            packs = [next(steps)[0] for _ in range(8)]
        for pack in packs:
            if pack.spec.epoch == 0:
                shards |= set(cache.row_shard[list(pack.spec.rows)].tolist())
        epoch_shards.append(shards)
        seen.append([pack.spec for pack in packs])
    assert not epoch_shards[0] & epoch_shards[1]
    with open_steps(cache, table, config, first_step=0, num_workers=0) as steps:
        both = [next(steps) for _ in range(8)]
    assert [[pack.spec for pack in step] for step in both] == [list(pair) for pair in zip(*seen, strict=True)]


def test_more_packs_than_shards_are_refused(tiny_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"packs_per_step = 999: .* --shard-tokens"):
        alone(tiny_cache, tmp_path / "run", "packs_per_step=999")


def test_sharding_alone_is_refused(tiny_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="torchrun"):
        alone(tiny_cache, tmp_path / "run", "shard=full")
