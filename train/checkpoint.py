"""Checkpoints of a run: the drafter in z-lab's layout, the optimiser's moments, and the step, in one folder.

A checkpoint is written beside, flushed and renamed, so that it is there whole or not at all. Everything else that a
step depends on (packs, anchors, noise, learning rate) is a function of the step and the run's configuration.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..drafter.checkpoint import load_drafter, save_drafter
from ..drafter.model import DFlashDrafter
from ..errors import CheckpointError
from ..store.durable import commit_dir

_OPTIMIZER, _STATE = "optimizer.safetensors", "state.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def checkpoint_path(run: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return run / "checkpoints" / f"step-{step:07d}"


def list_checkpoints(run: Path) -> list[Path]:
    """Return a run's checkpoints, oldest first."""
    return sorted(path for path in (run / "checkpoints").glob("step-*") if (path / _STATE).exists())


def save_checkpoint(
    run: Path,
    step: int,
    model: DFlashDrafter,
    optimizer: torch.optim.Optimizer,
    extra: dict[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint after `step` steps and delete all but the newest `keep`.

    Args:
        run: the run's folder.
        step: number of finished steps.
        model: its weights are saved in float32.
        optimizer: AdamW over the model's parameters.
        extra: what the drafter's config.json records of the run.
        keep: how many checkpoints stay.
    """
    path = checkpoint_path(run, step)
    beside = path.with_name(f".{path.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    save_drafter(beside, model, extra=extra)
    save_file(_moments(model, optimizer), beside / _OPTIMIZER)
    (beside / _STATE).write_text(json.dumps({"format": 1, "step": step}), encoding="utf-8")
    if path.exists():
        shutil.rmtree(path)
    commit_dir(beside, path)
    for old in list_checkpoints(run)[:-keep]:
        shutil.rmtree(old)
    return path


def restore_checkpoint(path: Path, model: DFlashDrafter, optimizer: torch.optim.Optimizer) -> int:
    """Load weights and moments into a model and its optimiser, and return the number of finished steps.

    Raises:
        CheckpointError: a file is missing, damaged or of another drafter.
    """
    try:
        step = json.loads((path / _STATE).read_text(encoding="utf-8"))["step"]
        moments = load_file(path / _OPTIMIZER)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}; delete this checkpoint to go on from the one before") from None
    saved, _, _ = load_drafter(path)
    model.load_state_dict(saved.state_dict())
    for name, parameter in model.named_parameters():
        state: dict[str, Tensor] = {"step": torch.tensor(float(step))}
        for moment in _MOMENTS:
            value = moments.get(f"{name}.{moment}")
            if value is None or value.shape != parameter.shape:
                raise CheckpointError(f"{path / _OPTIMIZER}: {name}.{moment} is missing or has another shape")
            state[moment] = value.to(parameter.device)
        optimizer.state[parameter] = state
    return int(step)


def _moments(model: DFlashDrafter, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}.{moment}": optimizer.state[parameter][moment].contiguous()
        for name, parameter in model.named_parameters()
        for moment in _MOMENTS
    }
