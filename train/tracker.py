"""Where a run's metrics go besides metrics.jsonl: TensorBoard, trackio or wandb, each an optional package."""

from __future__ import annotations

import importlib
import sys
from contextlib import redirect_stdout
from pathlib import Path
from secrets import token_hex
from types import ModuleType
from typing import Any, Protocol

from ..errors import ConfigError, message_line
from .run_folder import read_json, write_json


class Tracker(Protocol):
    """A place for numbers by step."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Record the values of a finished step."""

    def close(self) -> None:
        """Flush and end."""


class NoTracker:
    """Records nothing: metrics.jsonl has all of it anyway."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, run: Path, first_step: int) -> None:
        _package("tensorboard")
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (optional)

        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=first_step or None)  # type: ignore[no-untyped-call]

    def log(self, values: dict[str, float], step: int) -> None:
        """Record the values of a finished step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Flush and end."""
        self._writer.close()  # type: ignore[no-untyped-call]


class RunOf:
    """A run of wandb, or of trackio, which has the same calls; both keep their own settings (server, offline mode).

    A run that is resumed goes on as one run there too: RUN/tracker.json keeps its id. What the package prints goes to
    standard error, since standard output is the command's result.
    """

    def __init__(self, name: str, run: Path, config: dict[str, Any]) -> None:
        self._module = _package(name)
        run_id = _run_id(run)
        identity = {"id": run_id} if name == "wandb" else {}  # trackio knows a run by its name alone
        try:
            with redirect_stdout(sys.stderr):
                self._module.init(
                    project="dflash", name=f"{run.resolve().name}-{run_id}", config=config, resume="allow", **identity
                )
        except Exception as error:  # whatever the package raises: no key, no server, a full disk
            raise ConfigError(
                f"tracker = {name}: it cannot start: {message_line(error)}; see to that, or set tracker = none"
            ) from error

    def log(self, values: dict[str, float], step: int) -> None:
        """Record the values of a finished step."""
        self._module.log(values, step=step)

    def close(self) -> None:
        """Flush and end."""
        with redirect_stdout(sys.stderr):
            self._module.finish()


def _run_id(run: Path) -> str:
    """Return the id that the run was given at its first start with such a tracker."""
    path = run / "tracker.json"
    if not path.exists():
        write_json(path, {"id": token_hex(4)})
    return str(read_json(path).get("id"))


def open_tracker(name: str, run: Path, config: dict[str, Any], first_step: int) -> Tracker:
    """Return the tracker of that name for the run.

    Raises:
        ConfigError: its package is not installed.
    """
    if name == "none":
        return NoTracker()
    return TensorBoard(run, first_step) if name == "tensorboard" else RunOf(name, run, config)


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a step's metrics under flat names, such as `heldout/tau/micro` and `slot_accuracy/1`."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            flat |= {f"{name}/{inner}": number for inner, number in numbers(value).items()}
        elif isinstance(value, list):
            flat |= {f"{name}/{k}": float(number) for k, number in enumerate(value, 1) if number is not None}
        elif isinstance(value, int | float):
            flat[name] = float(value)
    return flat


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"tracker = {name}: {error}; pip install 'dflash-pipeline[{name}]', or set tracker = none"
        ) from None
