"""The fingerprint of a target's weights straight from its files, without memory for the model."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .describe import DTYPES, TargetConfig, TargetDescription
from .fingerprint import tensors_fingerprint
from .loading import attention_in_effect, auto_class, quiet_transformers

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def stored_weights(config: TargetConfig, description: TargetDescription) -> tuple[str, str] | None:
    """Return the fingerprint and the attention implementation that the loaded target would have.

    Reads the checkpoint's safetensors files once, tensor by tensor, under the names and in the dtypes of a model built
    without memory. It is the loaded target's fingerprint wherever the loader takes the tensors as they are; where it
    would rename, merge or fill in any, or the files are of another kind or not on this machine, only loading tells.

    Args:
        config: which model, and how.
        description: what `describe_target(config)` returned.

    Returns:
        (fingerprint, attention), or None where only loading tells.
    """
    files = _tensor_files(config)
    if files is None:
        return None
    try:
        with torch.device("meta"), quiet_transformers():
            model = auto_class(description).from_config(
                copy.deepcopy(description.config),
                dtype=DTYPES[description.dtype],
                attn_implementation=config.attention,
                trust_remote_code=config.trust_remote_code,
            )
    except Exception:  # models do what they like when they are built
        return None
    wanted = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    sources = _sources(model, wanted, files)
    if sources is None:
        return None
    fingerprint = _fingerprint(wanted, sources, files)
    if fingerprint is None:
        return None
    return fingerprint, attention_in_effect(model.config.get_text_config(decoder=True), config.attention)


def _tensor_files(config: TargetConfig) -> dict[str, Path] | None:
    """Return the file of each tensor of the checkpoint; None where it is not in safetensors files on this machine."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - as transformers, only where it is used
    from transformers.utils.hub import cached_file  # noqa: PLC0415 - seconds

    def find(name: str) -> Path | None:
        try:
            found = cached_file(config.name, name, revision=config.revision, local_files_only=True)
        except OSError:  # there is no such file, here
            return None
        return None if found is None else Path(found)

    try:
        whole = find(WEIGHTS)
        if whole is not None:
            with safe_open(whole, framework="pt") as file:
                return dict.fromkeys(file.keys(), whole)
        index = find(INDEX)
        if index is None:
            return None
        names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        places = {name: find(name) for name in set(names.values())}
        return {tensor: place for tensor, name in names.items() if (place := places[name]) is not None}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return None


def _sources(model: Any, wanted: Mapping[str, Tensor], files: Mapping[str, Path]) -> dict[str, str] | None:
    """Return under which name the files hold each tensor of the model: its own, or that of one it is tied to."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    sources = {}
    for name in wanted:
        tied = [other for other, parameter in parameters.items() if parameter is parameters.get(name)]
        source = next((other for other in (name, *tied) if other in files), None)
        if source is None:
            return None
        sources[name] = source
    return sources


def _fingerprint(wanted: Mapping[str, Tensor], sources: Mapping[str, str], files: Mapping[str, Path]) -> str | None:
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    with ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def read(name: str) -> Tensor:
            path = files[sources[name]]
            if path not in opened:
                opened[path] = stack.enter_context(safe_open(path, framework="pt"))
            tensor: Tensor = opened[path].get_tensor(sources[name])
            if tensor.shape != wanted[name].shape:
                raise ValueError(name)
            return tensor.to(wanted[name].dtype)

        try:
            return tensors_fingerprint(wanted, read)
        except (OSError, ValueError, SafetensorError):
            return None
