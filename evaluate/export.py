"""Export: the drafter's weights alone, in z-lab's layout, for serving engines."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..drafter.checkpoint import (
    CONFIG_NAME,
    DTYPES,
    WEIGHTS_NAME,
    LoadedDrafter,
    expected_shapes,
    load_drafter,
    save_drafter,
)
from ..errors import CacheMismatch, CheckpointError, ConfigError, DflashError
from .foreign import load_foreign
from .locate import locate_drafter

_FILES = {CONFIG_NAME, WEIGHTS_NAME}
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float32"}


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """One export.

    Attributes:
        run: a run's folder (its finished drafter, or else its newest checkpoint), a checkpoint's or a drafter's; or a
            file of `torch.save` with a training checkpoint of others (`load_foreign`).
        out: the folder to write.
        config, weights: of such a file, see `load_foreign`.

    Raises:
        ConfigError: config or weights are given for a folder, which has its own.
    """

    run: Path
    out: Path
    config: Path | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        if not self.run.is_file() and (self.config or self.weights):
            raise ConfigError(f"{self.run}: --config and --weights are for a checkpoint file; this is a folder")


def run_export(config: ExportConfig) -> dict[str, Any]:
    """Write OUT/config.json and OUT/model.safetensors, and nothing else.

    The weights take the dtype of the target's states, as the drafter records it, since engines run a drafter in its
    target's dtype; without a record they keep their own. The folder appears whole, after it was read back and found
    equal.

    Returns:
        The JSON object of `dflash export --json`: out, tensors, bytes, dtype, source, steps, unchanged; of a checkpoint
        file also weights_at and ignored_tensors.

    Raises:
        CheckpointError: there is no drafter, or what was written does not read back.
        CacheMismatch: OUT holds anything but an export of the same drafter.
    """
    foreign: dict[str, Any] = {}
    if config.run.is_file():
        source = config.run
        drafter, dtype, place, num_ignored = load_foreign(source, config.config, config.weights)
        foreign = {"weights_at": place, "ignored_tensors": num_ignored}
    else:
        source = locate_drafter(config.run)
        drafter = load_drafter(source)
        dtype = export_dtype(source, drafter)
    unchanged = _holds_anything(config.out)
    if unchanged:
        _check_same(config.out, drafter, dtype)
    else:
        _write(config.out, drafter, dtype)
    return {
        "out": str(config.out),
        "tensors": len(expected_shapes(drafter.config)),
        "bytes": sum((config.out / name).stat().st_size for name in _FILES),
        "dtype": dtype,
        "source": str(source),
        "steps": drafter.extra.get("steps"),
        "unchanged": unchanged,
        **foreign,
    }


def export_dtype(source: Path, drafter: LoadedDrafter) -> str:
    """Return the dtype to export in: the recorded one of the target, else that of the saved weights."""
    recorded = drafter.extra.get("target_dtype")
    if recorded is not None and recorded not in DTYPES:
        raise CheckpointError(f"{source}: target_dtype must be {' or '.join(DTYPES)}, found {recorded!r}")
    return recorded or _stored_dtype(source)


def _write(out: Path, drafter: LoadedDrafter, dtype: str) -> None:
    """Write beside, read back, rename."""
    out = out.absolute()  # "." has no name of its own
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        save_drafter(beside, drafter.model, dtype=dtype, extra=drafter.extra or None)
        _check_same(beside, drafter, dtype)
        beside.replace(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _check_same(directory: Path, drafter: LoadedDrafter, dtype: str) -> None:
    """Read a folder as an export and compare it with the drafter.

    Raises:
        CacheMismatch: it is something else, or of another drafter; the message names the first difference.
    """
    found = {path.name for path in directory.iterdir()} if directory.is_dir() else {directory.name}
    if found != _FILES:
        raise CacheMismatch(f"{directory}: holds {', '.join(sorted(found)[:4])}, not an export; choose another --out")
    try:
        there, stored = load_drafter(directory), _stored_dtype(directory)
    except DflashError as error:
        raise CacheMismatch(f"{directory}: not an export of a drafter ({error}); choose another --out") from error
    difference = _first_difference(there, drafter, dtype, stored)
    if difference:
        raise CacheMismatch(f"{directory}: holds an export of another drafter: {difference}; choose another --out")


def _first_difference(there: LoadedDrafter, drafter: LoadedDrafter, dtype: str, stored: str) -> str | None:
    if stored != dtype:
        return f"dtype {stored}, not {dtype}"
    for name, value in vars(drafter.config).items():
        if getattr(there.config, name) != value:
            return f"{name} {getattr(there.config, name)}, not {value}"
    weights: dict[str, Tensor] = there.model.state_dict()
    for name, weight in drafter.model.state_dict().items():
        if not torch.equal(weights[name], weight.to(DTYPES[dtype]).float()):
            return f"the weights of {name} differ"
    if there.extra != drafter.extra:
        names = [name for name in {**there.extra, **drafter.extra} if there.extra.get(name) != drafter.extra.get(name)]
        return f"{names[0]} {there.extra.get(names[0])}, not {drafter.extra.get(names[0])}"
    return None


def _stored_dtype(directory: Path) -> str:
    """Return the dtype of a drafter's weights on disk (float16, which we do not write, counts as float32)."""
    with safe_open(str(directory / WEIGHTS_NAME), framework="pt") as file:
        kinds = {_STORED[file.get_slice(name).get_dtype()] for name in file.keys()}  # noqa: SIM118 (not a dict)
    return "bfloat16" if kinds == {"bfloat16"} else "float32"


def _holds_anything(path: Path) -> bool:
    return path.exists() and (not path.is_dir() or any(path.iterdir()))
