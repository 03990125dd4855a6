"""Which drafter a path means: a drafter's own folder, a checkpoint's, or a run's."""

from __future__ import annotations

from pathlib import Path

from ..drafter.checkpoint import CONFIG_NAME, find_drafter_dir
from ..errors import CheckpointError

_CHECKPOINTS = "checkpoints"


def locate_drafter(path: Path) -> Path:
    """Return the folder of the drafter that `path` means.

    A run's finished drafter comes before its newest checkpoint, and that before nothing.

    Raises:
        CheckpointError: there is neither a drafter nor a run with a checkpoint.
    """
    try:
        return find_drafter_dir(path)
    except CheckpointError:
        checkpoints = sorted(path.glob(f"{_CHECKPOINTS}/step-*/{CONFIG_NAME}"))
        if not checkpoints:
            raise
        return find_drafter_dir(checkpoints[-1].parent)
