"""Runs: exact resume, refusals, what a run folder holds, and a drafter that learns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from dflash_pipeline.drafter.checkpoint import load_drafter
from dflash_pipeline.drafter.draft import pack_key_values, walk_pack
from dflash_pipeline.drafter.walk import WalkRow, micro_tau
from dflash_pipeline.errors import (
    CacheCorrupt,
    CacheIncomplete,
    CacheMismatch,
    CacheMissing,
    ConfigError,
    TrainingError,
)
from dflash_pipeline.store import open_cache
from dflash_pipeline.train.checkpoint import list_checkpoints
from dflash_pipeline.train.loop import TrainOptions, run_train
from dflash_pipeline.train.recipes import load_recipe, recipe_names
from dflash_pipeline.train.trainer import Trainer

SMALL = ["anchors_per_pack=12", "pack_tokens=400", "num_layers=2", "eval_rows=2", "shuffle_tokens=1000"]


def train(cache: Path, out: Path, *overrides: str, recipe: str = "default", workers: int = 0, say=lambda _line: None):
    loaded = load_recipe(recipe, [*SMALL, *overrides])
    result = run_train(TrainOptions(cache=cache, out=out, recipe=loaded, num_workers=workers, device="cpu"), say)
    assert result is not None
    return result


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_drafter(run).model.state_dict()


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Make the run die, as a kill would, before step `steps` + 1."""
    whole = Trainer.step

    def step(self, packs, number, weight):
        if number == steps:
            raise KeyboardInterrupt
        return whole(self, packs, number, weight)

    monkeypatch.setattr(Trainer, "step", step)


def test_twenty_steps_equal_ten_a_restart_and_ten_bit_for_bit(
    tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The corpus makes about twelve packs an epoch, so an epoch's boundary lies between."""
    settings = ["steps=20", "checkpoint_every=5", "eval_every=10", "noise_kind=uniform", "noise_scale=0.1"]
    whole = train(tiny_cache, tmp_path / "whole", *settings)
    with monkeypatch.context() as patch:
        stop_after(patch, 13)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_cache, tmp_path / "parts", *settings)
    resumed = train(tiny_cache, tmp_path / "parts", *settings, workers=2)
    assert resumed["resumed_from"] == 10
    assert resumed["final_loss"] == whole["final_loss"]
    assert resumed["heldout"] == whole["heldout"]
    ours, theirs = weights(tmp_path / "parts"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    lines = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "parts")]
    assert lines[0] == lines[1]
    epochs = {json.loads(line)["epoch"] for line in lines[0].splitlines()}
    assert len(epochs) > 1


def test_a_finished_run_is_not_done_again(tiny_cache: Path, tmp_path: Path) -> None:
    said: list[str] = []
    first = train(tiny_cache, tmp_path / "run", "steps=2")
    assert train(tiny_cache, tmp_path / "run", "steps=2", say=said.append) == first
    assert any("finished already" in line for line in said)


@pytest.mark.parametrize(("setting", "field"), [("steps=3", "steps"), ("seed=1", "seed"), ("gamma=5.0", "gamma")])
def test_other_settings_on_the_same_folder_are_refused_by_name(
    tiny_cache: Path, tmp_path: Path, setting: str, field: str
) -> None:
    train(tiny_cache, tmp_path / "run", "steps=2")
    with pytest.raises(CacheMismatch, match=f"started with {field} = "):
        train(tiny_cache, tmp_path / "run", "steps=2", setting)


def test_a_setting_left_to_its_default_is_called_so(tiny_cache: Path, tmp_path: Path) -> None:
    train(tiny_cache, tmp_path / "run", "steps=2", "block_size=4")
    with pytest.raises(CacheMismatch, match="started with block_size = 4, now its default"):
        train(tiny_cache, tmp_path / "run", "steps=2")


def test_a_folder_that_is_no_run_is_left_alone(tiny_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not a run"):
        train(tiny_cache, tmp_path, "steps=2")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_trains_from_the_same_cache(tiny_cache: Path, tmp_path: Path, recipe: str) -> None:
    result = train(tiny_cache, tmp_path / "run", "steps=3", recipe=recipe)
    assert result["steps"] == 3
    assert result["final_loss"] < 20
    assert result["heldout"][-1]["rows"] == 2
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["cache_fingerprint"] == open_cache(tiny_cache).fingerprint
    extra = load_drafter(tmp_path / "run").extra
    assert (extra["steps"], extra["label_source"]) == (3, config["recipe"]["label_source"])


def test_only_the_newest_checkpoints_stay(tiny_cache: Path, tmp_path: Path) -> None:
    train(tiny_cache, tmp_path / "run", "steps=6", "checkpoint_every=1", "keep_checkpoints=2")
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-0000005", "step-0000006"]


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_rows(tiny_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="row-0-"):
        train(tiny_cache, tmp_path / "run", "steps=30", "lr=1e30", "warmup_steps=0", "grad_clip=1e30")


def test_a_damaged_shard_is_named_and_nothing_reads_as_zeros(tiny_cache: Path, tmp_path: Path) -> None:
    for number, damage in enumerate(("delete", "truncate", "flip")):
        copy = shutil.copytree(tiny_cache, tmp_path / f"cache{number}")
        victim = max(
            (copy / "shards").rglob("states/3/c/**/*"), key=lambda path: path.stat().st_size if path.is_file() else 0
        )
        data = bytearray(victim.read_bytes())
        if damage == "delete":
            victim.unlink()
        elif damage == "truncate":
            victim.write_bytes(data[: len(data) // 2])
        else:
            data[len(data) // 3] ^= 4
            victim.write_bytes(data)
        with pytest.raises((CacheCorrupt, CacheMissing), match=r"states/3"):
            train(copy, tmp_path / f"run{number}", "steps=30")


def test_an_unfinished_cache_says_how_to_go_on(tiny_cache: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_cache, tmp_path / "cache")
    (copy / "manifest.json").unlink()
    with pytest.raises(CacheIncomplete, match="extract"):
        train(copy, tmp_path / "run", "steps=2")


def test_a_drafter_overfits_one_row_to_a_tau_of_its_block_size(tmp_path: Path, tiny_target_dir: Path) -> None:
    """One on-policy row of 8B + 1 reply tokens: every draft right, tau is B."""
    from transformers import AutoModelForCausalLM

    from dflash_pipeline.extract.config import ExtractConfig
    from dflash_pipeline.extract.run import run_extract

    target = AutoModelForCausalLM.from_pretrained(tiny_target_dir).eval()
    prompt = [1, 300, 301, 302, 303]
    with torch.no_grad():
        out = target.generate(
            torch.tensor([prompt]), do_sample=False, min_new_tokens=65, max_new_tokens=65, pad_token_id=2
        )[0].tolist()
    corpus = tmp_path / "row.jsonl"
    corpus.write_text(json.dumps({"id": "one", "prompt_ids": prompt, "completion_ids": out[5:]}) + "\n")
    cache_path = tmp_path / "cache"
    run_extract(ExtractConfig(corpus=(corpus,), target=str(tiny_target_dir), out=cache_path, device="cpu"))
    train(cache_path, tmp_path / "run", "steps=120", "lr=1e-2", "anchors_per_pack=64", "heldout_share=0.0")
    cache, drafter = open_cache(cache_path), load_drafter(tmp_path / "run")
    row, head = cache.read_row(0), cache.head()
    states = torch.cat([row.states[layer] for layer in drafter.config.context_layer_ids], 1).float()
    rows = [WalkRow.of(row.tokens.tolist(), row.loss_mask.tolist())]
    offsets = torch.tensor([0, len(row.tokens)])
    context = pack_key_values(drafter.model, states, offsets)
    walks = walk_pack(drafter.model, head.head_weight, head.embed_tokens, context, row_offsets=offsets, rows=rows)
    assert micro_tau(walks) == 8.0
