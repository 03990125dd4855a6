"""What a target's configuration and tokenizer say, read without its weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import TargetError
from .fingerprint import template_hash, tokenizer_hash

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Which model is the target and how it runs.

    `dtype` None means the checkpoint's own. `device` is `auto` (CUDA where there is one) or any torch device.

    Raises:
        TargetError: an unknown dtype or an unusable device.
    """

    name: str
    dtype: str | None = None
    attention: str = "sdpa"
    device: str = "auto"
    trust_remote_code: bool = False
    revision: str | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise TargetError("the target has no name: give a folder or a Hugging Face model id")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise TargetError(f"dtype {self.dtype!r}: expected one of {', '.join(DTYPES)}")
        resolve_device(self.device)


@dataclass(frozen=True, kw_only=True)
class TargetDescription:
    """A target before its weights are loaded. `max_length` is None where the configuration names no limit."""

    name: str
    revision: str | None
    config: Any
    text_config: Any
    tokenizer: Any
    dtype: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_length: int | None
    tokenizer_hash: str
    template_hash: str


def resolve_device(device: str) -> torch.device:
    """Return the torch device that a name means; `auto` is CUDA where there is one, else the CPU.

    Raises:
        TargetError: no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise TargetError(f"device {device!r}: expected auto, cpu, cuda or cuda:N") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise TargetError(f"device {device!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return found


def describe_target(config: TargetConfig) -> TargetDescription:
    """Read a target's configuration and tokenizer, from its folder or from the Hugging Face hub.

    Raises:
        TargetError: no such folder or model, not a causal language model, no tokenizer, or a float type that the cache
            cannot hold. One line.
    """
    from transformers import AutoConfig, AutoTokenizer  # noqa: PLC0415 - seconds

    _check_folder(config.name)
    options = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    try:
        model_config = AutoConfig.from_pretrained(config.name, **options)
        text_config = model_config.get_text_config(decoder=True)
    except Exception as error:
        missing = "" if Path(config.name).exists() else " (there is no folder of this name either)"
        raise TargetError(
            f"target {config.name}: its configuration cannot be read: {first_line(error)}{missing}"
        ) from error
    if model_config.is_encoder_decoder:
        raise TargetError(f"target {config.name}: {model_config.model_type} is an encoder-decoder, not a causal model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.name, **options)
    except Exception as error:
        raise TargetError(f"target {config.name}: its tokenizer cannot be loaded: {first_line(error)}") from error
    if not tokenizer("plain text", add_special_tokens=False)["input_ids"]:
        raise TargetError(f"target {config.name}: its tokenizer has no vocabulary; its files seem to be missing")
    sizes = {name: _size(config.name, text_config, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    limit = getattr(text_config, "max_position_embeddings", None)
    return TargetDescription(
        name=config.name,
        revision=getattr(model_config, "_commit_hash", None) or config.revision,
        config=model_config,
        text_config=text_config,
        tokenizer=tokenizer,
        dtype=config.dtype or _own_dtype(config.name, model_config, text_config),
        hidden_size=sizes["hidden_size"],
        num_layers=sizes["num_hidden_layers"],
        vocab_size=sizes["vocab_size"],
        max_length=limit if isinstance(limit, int) and limit > 0 else None,
        tokenizer_hash=tokenizer_hash(tokenizer),
        template_hash=template_hash(tokenizer),
    )


def _check_folder(name: str) -> None:
    path = Path(name).expanduser()
    looks_like_path = path.is_absolute() or name.startswith((".", "~")) or name.count(os.sep) > 1
    if path.is_file():
        raise TargetError(f"target {name}: this is a file; give the folder that holds config.json and the weights")
    if path.is_dir() and not (path / "config.json").is_file():
        raise TargetError(f"target {name}: the folder has no config.json, so it is not a Hugging Face model")
    if looks_like_path and not path.exists():
        raise TargetError(f"target {name}: there is no such folder")


def _own_dtype(name: str, model_config: Any, text_config: Any) -> str:
    found = getattr(text_config, "dtype", None) or getattr(model_config, "dtype", None) or "float32"
    text = str(found).removeprefix("torch.")
    if text not in DTYPES:
        raise TargetError(
            f"target {name}: its checkpoint is {text}, and the cache holds bfloat16 or float32: pass --dtype bfloat16 "
            "or --dtype float32"
        )
    return text


def _size(name: str, text_config: Any, key: str) -> int:
    value = getattr(text_config, key, None)
    if not isinstance(value, int) or value < 1:
        raise TargetError(f"target {name}: its configuration ({text_config.model_type}) has no {key}")
    return value


def first_line(error: BaseException) -> str:
    """Return the type and the first line of an error's message, for a message of one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0].strip()}" if text else type(error).__name__
