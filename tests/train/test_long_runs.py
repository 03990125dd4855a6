"""SIGTERM, checkpoints by time, settings that may change on resume, and trackers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from dflash_pipeline.errors import CacheMismatch, CheckpointError, ConfigError
from dflash_pipeline.train.checkpoint import list_checkpoints
from dflash_pipeline.train.loop import TrainOptions, run_train
from dflash_pipeline.train.recipes import load_recipe
from dflash_pipeline.train.tracker import numbers, open_tracker

SMALL = ["anchors_per_pack=12", "pack_tokens=400", "num_layers=2", "eval_rows=2", "shuffle_tokens=1000"]


def train(cache: Path, out: Path, *overrides: str) -> dict:
    recipe = load_recipe("default", [*SMALL, *overrides])
    result = run_train(TrainOptions(cache=cache, out=out, recipe=recipe, device="cpu"), lambda _line: None)
    assert result is not None
    return result


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_and_saves_and_the_run_goes_on_from_there(
    tiny_cache: Path, tmp_path: Path, number: signal.Signals
) -> None:
    settings = [*SMALL, "steps=400", "eval_every=400"]
    command = [sys.executable, "-m", "dflash_pipeline.cli", "train", "--cache", str(tiny_cache), "--json"]
    for setting in settings:
        command += ["--set", setting]
    command += ["--out", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert f"stopped by {number.name} after step" in err
    steps = metrics.read_text().count("\n")
    assert list_checkpoints(tmp_path / "run")[-1].name == f"step-{steps:07d}"
    if number == signal.SIGINT:  # the shell goes on to no other command
        assert process.returncode == 1
        assert err.endswith("dflash: interrupted; the same command resumes\n")
        assert not out
    else:
        assert process.returncode == 0, err
        stopped = json.loads(out)
        assert (stopped["finished"], stopped["steps"]) == (False, steps)
    assert not (tmp_path / "run" / "drafter").exists()


def test_checkpoints_come_by_time_too(tiny_cache: Path, tmp_path: Path) -> None:
    train(tiny_cache, tmp_path / "run", "steps=4", "checkpoint_minutes=1e-9", "keep_checkpoints=9")
    assert len(list_checkpoints(tmp_path / "run")) == 4


def test_a_checkpoint_that_was_damaged_is_not_gone_on_from(tiny_cache: Path, tmp_path: Path) -> None:
    train(tiny_cache, tmp_path / "run", "steps=4", "checkpoint_every=2")
    for name in ("result.json", "drafter"):
        path = tmp_path / "run" / name
        path.unlink() if path.is_file() else shutil.rmtree(path)
    last = list_checkpoints(tmp_path / "run")[-1]
    for name in ("model.safetensors", "optimizer.safetensors"):
        whole = (last / name).read_bytes()
        for damaged in (whole[:-4] + b"\0\0\0\x40", whole[:1000]):
            (last / name).write_bytes(damaged)
            with pytest.raises(CheckpointError, match=rf"{name}: not what was saved .*delete this checkpoint to go on"):
                train(tiny_cache, tmp_path / "run", "steps=4", "checkpoint_every=2")
        (last / name).write_bytes(whole)
    shutil.rmtree(last)
    assert train(tiny_cache, tmp_path / "run", "steps=4", "checkpoint_every=2")["resumed_from"] == 2


def test_a_folder_in_which_no_step_was_done_takes_other_settings(tiny_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shard = full needs several processes"):
        train(tiny_cache, tmp_path / "run", "steps=2", "shard=full")
    train(tiny_cache, tmp_path / "run", "steps=2")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]["shard"] == "none"
    with pytest.raises(CacheMismatch, match=r"started with recipe.*lr|started with lr"):
        train(tiny_cache, tmp_path / "run", "steps=2", "lr=0.5")


def test_a_share_that_holds_no_row_out_is_said(tiny_cache: Path, tmp_path: Path) -> None:
    recipe, said = load_recipe("default", [*SMALL, "steps=1", "heldout_share=1e-9"]), list[str]()
    run_train(TrainOptions(cache=tiny_cache, out=tmp_path / "run", recipe=recipe, device="cpu"), said.append)
    assert any("heldout_share = 1e-09 holds no row out" in line for line in said)


def test_what_no_weight_depends_on_may_change_on_resume(tiny_cache: Path, tmp_path: Path) -> None:
    first = train(tiny_cache, tmp_path / "run", "steps=2", "eval_every=1")
    assert train(tiny_cache, tmp_path / "run", "steps=2", "eval_every=2", "keep_checkpoints=5") == first


def test_tensorboard_gets_the_numbers(tiny_cache: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(tiny_cache, tmp_path / "run", "steps=3", "tracker=tensorboard")
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([line["loss"] for line in lines])
    assert "heldout/tau/micro" in events.Tags()["scalars"]


def test_a_tracker_that_is_not_installed_is_named_with_its_remedy(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"tracker = wandb: .*pip install 'dflash-pipeline\[wandb\]'"):
        open_tracker("wandb", tmp_path, {}, 0)


def test_a_resumed_run_is_one_run_for_its_tracker_and_prints_nothing_there(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    (tmp_path / "run").mkdir()
    start = f"""
from pathlib import Path
from dflash_pipeline.train.tracker import open_tracker
tracker = open_tracker("trackio", Path({str(tmp_path / "run")!r}), {{"lr": 1}}, 0)
for step in (STEPS):
    tracker.log({{"loss": 1.0 / step}}, step)
tracker.close()
"""
    for steps in ("1, 2", "3, 4"):
        done = subprocess.run(
            [sys.executable, "-c", start.replace("STEPS", steps)],
            env=os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == ""
    with closing(sqlite3.connect(tmp_path / "trackio" / "dflash.db")) as database:
        found = database.execute("select run_name, step from metrics order by step").fetchall()
    assert [step for _, step in found] == [1, 2, 3, 4]
    assert len({name for name, _ in found}) == 1


def test_a_tracker_that_cannot_start_is_one_line(tmp_path: Path, monkeypatch) -> None:
    trackio = pytest.importorskip("trackio")

    def refuse(**_: object) -> None:
        raise RuntimeError("no key\nlog in")

    monkeypatch.setattr(trackio, "init", refuse)
    with pytest.raises(
        ConfigError, match=r"^tracker = trackio: it cannot start: no key; see to that, or set tracker = none$"
    ):
        open_tracker("trackio", tmp_path, {}, 0)


def test_numbers_are_flat_and_leave_out_what_is_no_number() -> None:
    metrics = {"loss": 1, "slot_accuracy": [0.5, None], "heldout": {"tau": {"micro": 2.0}}, "name": "x"}
    assert numbers(metrics) == {"loss": 1.0, "slot_accuracy/1": 0.5, "heldout/tau/micro": 2.0}
