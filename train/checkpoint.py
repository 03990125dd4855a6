"""Checkpoints of a run: the drafter in z-lab's layout, the optimiser's moments, and the step, in one folder.

A checkpoint is written beside, flushed and renamed, so that it is there whole or not at all; state.json has the digests
of its files, which are checked when a run goes on. Everything else that a step depends on (packs, anchors, noise,
learning rate) is a function of the step and the run's configuration.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..drafter.checkpoint import load_drafter, save_drafter
from ..drafter.model import DFlashDrafter
from ..errors import CheckpointError
from ..store.durable import commit_dir
from ..store.record import file_fields, record_files
from .optimizer import MOMENTS
from .run_folder import CHECKPOINTS

_OPTIMIZER, _STATE = "optimizer.safetensors", "state.json"


def checkpoint_path(run: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return run / CHECKPOINTS / f"step-{step:07d}"


def list_checkpoints(run: Path) -> list[Path]:
    """Return a run's checkpoints, oldest first."""
    return sorted(path for path in (run / CHECKPOINTS).glob("step-*") if (path / _STATE).exists())


def save_checkpoint(
    run: Path, step: int, model: DFlashDrafter, moments: dict[str, Tensor], extra: dict[str, Any], keep: int
) -> Path:
    """Write the checkpoint after `step` steps and delete all but the newest `keep`.

    Args:
        run: the run's folder.
        step: number of finished steps.
        model: its weights are saved in float32.
        moments: `<parameter>.exp_avg` and `.exp_avg_sq` of every parameter.
        extra: what the drafter's config.json records of the run.
        keep: how many checkpoints stay.
    """
    path = checkpoint_path(run, step)
    beside = path.with_name(f".{path.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    save_drafter(beside, model, extra=extra)
    save_file(moments, beside / _OPTIMIZER)
    state = {"format": 1, "step": step, "files": file_fields(record_files(beside))}
    (beside / _STATE).write_text(json.dumps(state), encoding="utf-8")
    if path.exists():
        shutil.rmtree(path)
    commit_dir(beside, path)
    for old in list_checkpoints(run)[:-keep]:
        shutil.rmtree(old)
    return path


def read_checkpoint(path: Path, model: DFlashDrafter) -> tuple[int, dict[str, Tensor]]:
    """Load the weights into `model`; return the number of finished steps and the optimiser's moments.

    Raises:
        CheckpointError: a file is missing, damaged or of another drafter.
    """
    remedy = "delete this checkpoint to go on from the one before"
    try:
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        step, files = int(state["step"]), dict(state["files"])
        found = file_fields(record_files(path))
        damaged = next((name for name in files if files[name] != found.get(name)), None)
        if damaged is not None:
            raise CheckpointError(f"{path / damaged}: not what was saved (size or digest); {remedy}")
        moments = load_file(path / _OPTIMIZER)
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error!r}; {remedy}") from None
    saved, _, _ = load_drafter(path)
    model.load_state_dict(saved.state_dict())
    for name, parameter in model.named_parameters():
        for moment in MOMENTS:
            value = moments.get(f"{name}.{moment}")
            if value is None or value.shape != parameter.shape:
                raise CheckpointError(f"{path / _OPTIMIZER}: {name}.{moment} is missing or has another shape")
    return step, moments
