"""A drafter inside a training checkpoint of others: one torch file, optimiser and all, of which only it is read.

The file is mapped, not loaded, and only tensors and plain containers are taken from it: no code of it runs.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..drafter.checkpoint import CONFIG_NAME, LoadedDrafter, expected_shapes, read_config
from ..drafter.config import ARCHITECTURE, DrafterConfig
from ..drafter.model import DFlashDrafter
from ..errors import CheckpointError, message_line

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of a name that training wrappers add: DataParallel, torch.compile, FSDP, activation checkpointing."""
CONFIG_KEYS = ("config", "model_config", "drafter_config", "draft_config")
PARTS = frozenset({"layers", "fc", "norm", "hidden_norm"})
"""What a drafter's names begin with: none of them may be left out."""
_MAX_DEPTH = 4
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ForeignDrafter(NamedTuple):
    """The drafter; the dtype its weights had; where in the file they lay; the tensors beside them, by number."""

    drafter: LoadedDrafter
    dtype: str
    place: str
    num_ignored: int


class _Found(NamedTuple):
    """Weights in the file: the keys that lead to their mapping, and what comes before their names in it."""

    keys: tuple[str, ...]
    prefix: str
    tensors: dict[str, Tensor]

    @property
    def place(self) -> str:
        return "/".join([*self.keys, self.prefix]) or "the top"


def load_foreign(path: Path, config: Path | None = None, weights: str | None = None) -> ForeignDrafter:
    """Read the drafter in a torch checkpoint.

    Args:
        path: a file of `torch.save` (the zip format, torch 1.6 and newer).
        config: a config.json in z-lab's layout; None: one beside the file, or inside it.
        weights: which weights, as an earlier refusal named them, where the file holds several drafters.

    Raises:
        CheckpointError: it is not such a file, holds no drafter or several, the configuration is missing, or the
            weights do not fit it: too few, too many, or of other shapes.
    """
    content = _read(path)
    found = _choose(path, list(_search(content, ())), weights)
    parsed = _config(path, config, content)
    shapes = expected_shapes(parsed)
    missing = [name for name in shapes if found.prefix + name not in found.tensors]
    if missing:
        raise CheckpointError(
            f"{path}: {found.place} has no {missing[0]} ({len(missing)} of {len(shapes)} are missing)"
        )
    there = [name.removeprefix(found.prefix) for name in found.tensors if name.startswith(found.prefix)]
    unknown = [name for name in there if name not in shapes and name.split(".")[0] in PARTS]
    if unknown:
        raise CheckpointError(
            f"{path}: {found.place} has a {unknown[0]} that the configuration does not ask for ({len(unknown)} such): "
            "give the configuration that it was trained with"
        )
    kinds = set()
    tensors = {}
    for name, shape in shapes.items():
        tensor = found.tensors[found.prefix + name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{path}: {name} has shape {list(tensor.shape)}, the configuration asks for {list(shape)}"
            )
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"{path}: {name} is {tensor.dtype}, expected float32, bfloat16 or float16")
        kinds.add(tensor.dtype)
        tensors[name] = tensor.detach().to(torch.float32, copy=True)
        if not bool(torch.isfinite(tensors[name]).all()):
            raise CheckpointError(f"{path}: {name} holds values that are not finite")
    with torch.device("meta"):
        model = DFlashDrafter(parsed)
    model.load_state_dict(tensors, strict=True, assign=True)
    dtype = "bfloat16" if kinds == {torch.bfloat16} else "float32"
    num_ignored = len(found.tensors) - len(shapes)
    return ForeignDrafter(LoadedDrafter(model.eval(), parsed, {}), dtype, found.place, num_ignored)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds more than tensors and plain containers ({message_line(error)[:200]}); objects are never "
            "unpickled: save its state dict alone, where it was made, and give that"
        ) from error
    except (RuntimeError, OSError, ValueError, EOFError) as error:
        if path.is_file() and not zipfile.is_zipfile(path):
            raise CheckpointError(
                f"{path}: not a file of torch.save that can be mapped: no zip file, as torch has written since 1.6; it "
                "is cut short, something else, or has to be saved again by a newer torch"
            ) from error
        raise CheckpointError(
            f"{path}: not a file of torch.save that can be mapped: {message_line(error)[:200]}"
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: expected a dictionary, found a {type(content).__name__}")
    return content


def _search(content: Mapping[Any, Any], keys: tuple[str, ...]) -> Iterator[_Found]:
    """Yield every drafter in a mapping and the mappings in it: where fc and hidden_norm stand side by side."""
    tensors = {
        ".".join(part for part in name.split(".") if part not in WRAPPERS): value
        for name, value in content.items()
        if isinstance(name, str) and isinstance(value, Tensor)
    }
    for name in tensors:
        prefix = name.removesuffix("fc.weight")
        if name != prefix and (not prefix or prefix.endswith(".")) and f"{prefix}hidden_norm.weight" in tensors:
            yield _Found(keys, prefix, tensors)
    if len(keys) < _MAX_DEPTH:
        for name, value in content.items():
            if isinstance(value, Mapping):
                yield from _search(value, (*keys, str(name)))


def _choose(path: Path, found: list[_Found], wanted: str | None) -> _Found:
    places = ", ".join(each.place for each in found[:8])
    if not found:
        raise CheckpointError(f"{path}: holds no DFlash drafter: no fc.weight with a hidden_norm.weight beside it")
    chosen = [each for each in found if wanted in (None, each.place)]
    if len(chosen) != 1:
        problem = f"holds no drafter at {wanted}" if wanted else f"holds {len(found)} drafters"
        raise CheckpointError(f"{path}: {problem}; choose one with --weights: {places}")
    return chosen[0]


def _config(path: Path, given: Path | None, content: Mapping[str, Any]) -> DrafterConfig:
    """Read the configuration that was given, else the one beside the file, else the one inside it."""
    beside = path.parent / CONFIG_NAME
    inside = [content[key] for key in CONFIG_KEYS if isinstance(content.get(key), Mapping)]
    if given is not None:
        where, value = str(given), read_config(given)
    elif beside.is_file() and read_config(beside).get("architectures") == [ARCHITECTURE]:
        where, value = str(beside), read_config(beside)
    elif inside and "dflash_config" in inside[0]:
        where, value = str(path), dict(inside[0])
    else:
        raise CheckpointError(f"{path}: carries no configuration of a drafter: give its config.json with --config")
    try:
        return DrafterConfig.from_zlab(value)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
