"""What a run keeps on disk beside its checkpoints, and the check that a resumed run is the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import CacheMismatch, CheckpointError, ConfigError
from ..store.durable import write_atomic
from .config import ResolvedConfig

CONFIG, METRICS, RESULT, DRAFTER = "config.json", "metrics.jsonl", "result.json", "drafter"
CHECKPOINTS = "checkpoints"
_FINGERPRINT = "cache_fingerprint"
_HOUSEKEEPING = {
    "eval_every",
    "eval_rows",
    "checkpoint_every",
    "checkpoint_minutes",
    "keep_checkpoints",
    "tracker",
}
"""What may change when a run is resumed: no weight depends on it."""


class RunFolder:
    """RUN/config.json, metrics.jsonl and result.json.

    Raises (on `open`):
        CacheMismatch: the folder holds a run with other settings or from another cache; the message names the field.
        ConfigError: the folder is not empty and not a run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def saved_config(self) -> dict[str, Any] | None:
        """Return the saved configuration, or None for a new folder."""
        if not (self.path / CONFIG).exists():
            if self.path.exists() and (not self.path.is_dir() or _holds_files(self.path)):
                raise ConfigError(f"{self.path}: not empty and not a run; choose another --out")
            return None
        value = read_json(self.path / CONFIG)
        if "recipe" not in value:
            raise ConfigError(f"{self.path}: its config.json is not a run's; choose another --out")
        return value

    def start(self, config: ResolvedConfig, record: dict[str, Any]) -> list[str]:
        """Save the configuration of a run that has done no step, or check it against the saved one; return notices.

        Args:
            config: of this start.
            record: what else the file records (versions), not compared.
        """
        wanted = config.as_dict()
        saved = self.saved_config()
        if saved is None or not self._has_stepped():
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / CONFIG, wanted | record)
            return []
        for name, ours, theirs in differences(wanted, saved):
            raise CacheMismatch(
                f"{self.path}: this run was started with {name} = {_shown(theirs)}, now {_shown(ours)}; "
                "give the same settings to resume it, or another --out"
            )
        if saved.get(_FINGERPRINT) != wanted[_FINGERPRINT]:
            return ["the cache was repaired since this run started: its fingerprint has changed, its identity has not"]
        return []

    def _has_stepped(self) -> bool:
        """Tell whether there is anything that other settings would contradict."""
        return any((self.path / name).exists() for name in (METRICS, RESULT, CHECKPOINTS))

    def result(self) -> dict[str, Any] | None:
        """Return the result of a finished run."""
        path = self.path / RESULT
        return read_json(path) if path.exists() else None

    def finish(self, result: dict[str, Any]) -> None:
        """Save the result: from now on the run is finished."""
        write_json(self.path / RESULT, result)

    def forget_metrics_after(self, step: int) -> None:
        """Drop metrics of steps that will be done again."""
        path = self.path / METRICS
        if path.exists():
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
            write_atomic(path, "".join(line + "\n" for line in lines).encode())

    def append_metrics(self, values: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl."""
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def heldout_curve(self) -> list[dict[str, Any]]:
        """Return step, tau and per-slot accuracy of every held-out evaluation so far."""
        path = self.path / METRICS
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        values = [json.loads(line) for line in lines]
        return [{"step": value["step"], **value["heldout"]} for value in values if "heldout" in value]


def differences(wanted: dict[str, Any], saved: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (name, wanted, saved) of every setting of the result that differs, those of the recipe first."""
    found = []
    for part in ("recipe", "drafter"):
        theirs = saved.get(part) or {}
        found += [(name, value, theirs.get(name)) for name, value in wanted[part].items() if theirs.get(name) != value]
    rest = [name for name in wanted if name not in ("recipe", "drafter", _FINGERPRINT)]
    found += [(name, wanted[name], saved.get(name)) for name in rest if saved.get(name) != wanted[name]]
    return [difference for difference in found if difference[0] not in _HOUSEKEEPING]


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object; CheckpointError where the file is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object; the path holds the old one or the new, never a part."""
    write_atomic(path, (json.dumps(value, indent=2) + "\n").encode())


def _shown(value: Any) -> str:
    return "its default" if value is None else repr(value)


def _holds_files(path: Path) -> bool:
    return any(not child.name.startswith(".") for child in path.iterdir())


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 1 << 62  # a line cut short by a crash is dropped
