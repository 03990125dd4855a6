"""A drafter on disk: config.json and model.safetensors in z-lab's layout, nothing else.

The weights are written first and config.json last; each beside its place, synced, renamed. A folder without
config.json is no drafter, so a crash never leaves a mixture that loads.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import CheckpointError, ConfigError
from .config import ARCHITECTURE, EXTRA_KEY, DrafterConfig
from .model import DFlashDrafter

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_STORED_DTYPES = ("F32", "BF16", "F16")
_MAX_CONFIG_BYTES = 4_000_000


class SavedDrafter(NamedTuple):
    """What `save_drafter` wrote."""

    num_tensors: int
    num_bytes: int


class LoadedDrafter(NamedTuple):
    """What `load_drafter` read; `extra` is config.json's `dflash_pipeline`, empty in a drafter of others."""

    model: DFlashDrafter
    config: DrafterConfig
    extra: dict[str, Any]


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of the checkpoint: 3 + 11 per layer."""
    hidden, inter, head = config.hidden_size, config.intermediate_size, config.head_dim
    wide, narrow = config.num_heads * head, config.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.num_context_layers * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    parts: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (wide, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, wide),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (inter, hidden),
        "mlp.up_proj": (inter, hidden),
        "mlp.down_proj": (hidden, inter),
    }
    for layer in range(config.num_layers):
        shapes.update({f"layers.{layer}.{part}.weight": shape for part, shape in parts.items()})
    return shapes


def save_drafter(
    directory: Path, model: DFlashDrafter, *, dtype: str = "float32", extra: Mapping[str, Any] | None = None
) -> SavedDrafter:
    """Write `model` to `directory` (made if need be), weights cast to `dtype`: float32 or bfloat16.

    `extra` is JSON that goes under config.json's key `dflash_pipeline`. Weights that are not finite raise
    CheckpointError, and nothing is written.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be {' or '.join(DTYPES)}, found {dtype!r}")
    tensors = {
        name: value.detach().to(device="cpu", dtype=DTYPES[dtype]).contiguous()
        for name, value in model.state_dict().items()
    }
    for name, value in tensors.items():
        _require_finite(name, value, directory)
    config = model.config.to_zlab(dtype)
    if extra is not None:
        config[EXTRA_KEY] = dict(extra)
    text = json.dumps(config, indent=2, sort_keys=True, allow_nan=False) + "\n"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_NAME).unlink(missing_ok=True)
    _write_atomically(directory / WEIGHTS_NAME, lambda beside: save_file(tensors, beside, metadata={"format": "pt"}))
    _write_atomically(directory / CONFIG_NAME, lambda beside: beside.write_text(text, encoding="utf-8"))
    num_bytes = sum((directory / name).stat().st_size for name in (WEIGHTS_NAME, CONFIG_NAME))
    return SavedDrafter(len(tensors), num_bytes)


def find_drafter_dir(path: Path) -> Path:
    """Return the drafter's folder: `path` itself, or the finished drafter of the run folder `path`."""
    for directory in (path, path / "drafter"):
        config = directory / CONFIG_NAME
        if config.is_file() and read_config(config).get("architectures") == [ARCHITECTURE]:
            return directory
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: pass a drafter's folder or a run's")
    raise CheckpointError(
        f"{path} holds no drafter: neither it nor its folder drafter/ has a config.json of a {ARCHITECTURE}; "
        "a run that has not finished has none yet (dflash train resumes it)"
    )


def load_drafter(path: Path, *, dtype: torch.dtype = torch.float32) -> LoadedDrafter:
    """Read the drafter in `path`, or that of the run `path`, on the CPU in `dtype`, in evaluation mode.

    Strict: every tensor must be there in its shape and no other. Raises CheckpointError, in one line, for anything
    missing, unknown, not finite or not understood.
    """
    directory = find_drafter_dir(path)
    raw = read_config(directory / CONFIG_NAME)
    try:
        config = DrafterConfig.from_zlab(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from error
    extra = raw.get(EXTRA_KEY, {})
    if not isinstance(extra, dict):
        raise CheckpointError(f"{directory}: config.json: {EXTRA_KEY} must be an object")
    tensors = _read_weights(directory / WEIGHTS_NAME, expected_shapes(config), dtype)
    with torch.device("meta"):
        model = DFlashDrafter(config)
    model.load_state_dict(tensors, strict=True, assign=True)
    return LoadedDrafter(model.eval(), config, extra)


def read_config(path: Path) -> dict[str, Any]:
    """Return the JSON object of a config.json. Raises CheckpointError where it is too large or not one."""
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise CheckpointError(f"{path} has more than {_MAX_CONFIG_BYTES} bytes: not a model's configuration")
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} cannot be read as JSON: {_one_line(error)}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found a {type(config).__name__}")
    return config


def _read_weights(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Check the header against `shapes`, then read each tensor."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: a drafter's weights are in this one file")
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            _refuse_names("misses", sorted(set(shapes) - names), path)
            _refuse_names("has unknown", sorted(names - set(shapes)), path)
            for name, shape in shapes.items():
                header = file.get_slice(name)
                if tuple(header.get_shape()) != shape:
                    raise CheckpointError(
                        f"{path}: {name} has shape {list(header.get_shape())}, config.json asks for {list(shape)}"
                    )
                if header.get_dtype() not in _STORED_DTYPES:
                    raise CheckpointError(
                        f"{path}: {name} is {header.get_dtype()}, expected {', '.join(_STORED_DTYPES)}"
                    )
            tensors = {name: file.get_tensor(name).to(dtype, copy=True) for name in shapes}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {_one_line(error)}") from error
    for name, value in tensors.items():
        _require_finite(name, value, path)
    return tensors


def _refuse_names(what: str, names: list[str], path: Path) -> None:
    if names:
        shown = ", ".join(repr(name)[1:-1][:80] for name in names[:3])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise CheckpointError(f"{path} {what} tensors: {shown}{more}")


def _require_finite(name: str, value: Tensor, where: Path) -> None:
    if not bool(torch.isfinite(value).all()):
        raise CheckpointError(f"{where}: {name} holds values that are not finite")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make the file beside its place; sync it, rename it, sync the folder."""
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        write(beside)
        _sync(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
