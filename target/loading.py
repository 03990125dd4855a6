"""Loading a target: a frozen causal language model, checked to be understood before anything is captured from it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import TargetError
from .describe import DTYPES, TargetConfig, TargetDescription, describe_target, first_line, resolve_device
from .fingerprint import weights_fingerprint
from .norm import EffectiveNorm, effective_norm
from .parts import Parts, find_parts
from .selftest import check_target

__all__ = ["Target", "TargetConfig", "end_tokens", "load_target"]

SELF_TEST_TEXT = "The quick brown fox, aged 12, jumps over 34 lazy dogs; then it sleeps."
SELF_TEST_TOKENS = 16


@dataclass(kw_only=True)
class Target:
    """A loaded, frozen target in evaluation mode that passed its self-test.

    `notices` are lines for the user, such as a faster dtype on this machine.
    """

    model: Any
    description: TargetDescription
    parts: Parts
    norm: EffectiveNorm
    device: torch.device
    notices: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name or folder it was loaded from; informative."""
        return self.description.name

    @property
    def revision(self) -> str | None:
        """The hub's commit, where the model came from there."""
        return self.description.revision

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self.description.tokenizer

    @property
    def config(self) -> Any:
        """The text configuration, also of a multimodal wrapper."""
        return self.parts.text_config

    @property
    def dtype(self) -> torch.dtype:
        """The type of its weights and states."""
        return DTYPES[self.description.dtype]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.description.hidden_size

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return self.description.num_layers

    @property
    def vocab_size(self) -> int:
        """The rows of its head, which may exceed the tokenizer's tokens."""
        return int(self.parts.head_weight.shape[0])

    @property
    def tokenizer_hash(self) -> str:
        """A digest of everything that makes ids out of text."""
        return self.description.tokenizer_hash

    @property
    def template_hash(self) -> str:
        """A digest of its chat template, or `none`."""
        return self.description.template_hash

    @cached_property
    def fingerprint(self) -> str:
        """The xxh3-128 digest of all weights; computed on first use, at the speed of reading them."""
        return weights_fingerprint(self.model)

    def head_tensors(self) -> tuple[Tensor, Tensor | None, Tensor, float]:
        """Return embed_tokens [V, H], lm_head [V, H] or None where tied, the norm's effective weight [H], epsilon.

        On the CPU; the matrices in the target's dtype, the norm weight in float32.
        """
        embed, head = self.parts.embed_weight.detach(), self.parts.head_weight.detach()
        return embed.cpu(), None if self.parts.tied else head.cpu(), self.norm.weight, self.norm.eps

    def save_files(self, directory: Path) -> None:
        """Write config.json (the text configuration), tokenizer and chat template into an existing folder."""
        content = {key: value for key, value in self.config.to_dict().items() if key != "_name_or_path"}
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        (directory / "config.json").write_text(text, encoding="utf-8")
        self.tokenizer.save_pretrained(directory)


def load_target(config: TargetConfig, description: TargetDescription | None = None) -> Target:
    """Load a causal language model, freeze it, find its parts and run the self-test.

    Of a multimodal wrapper only the language model is loaded where transformers knows it by itself (Qwen3.5), else
    the whole wrapper.

    Args:
        config: which model, and how.
        description: what `describe_target(config)` returned, where the caller has it already.

    Raises:
        TargetError: in one line, anything that keeps this model from being a target.
    """
    description = description or describe_target(config)
    device = resolve_device(config.device)
    notices = slow_bfloat16_notice(description.dtype, device)
    model, ignored = _load_model(config, description, device)
    if ignored:
        notices.append(
            f"the checkpoint has {len(ignored)} tensors that the language model does not use, such as {min(ignored)}"
        )
    parts = find_parts(model)
    if parts.head_weight.shape[0] != description.vocab_size or parts.embed_weight.dtype != DTYPES[description.dtype]:
        raise TargetError(
            f"target {config.name}: its head is {parts.head_weight.dtype} with {parts.head_weight.shape[0]} rows, but "
            f"its configuration says {description.dtype} and {description.vocab_size}"
        )
    norm = effective_norm(parts.norm, description.hidden_size, parts.text_config)
    check_target(model, parts, norm, _self_test_ids(description))
    return Target(model=model, description=description, parts=parts, norm=norm, device=device, notices=notices)


def slow_bfloat16_notice(dtype: str, device: torch.device) -> list[str]:
    """Return a notice if the device is a CPU that multiplies bfloat16 at under half the speed of float32.

    Takes about 50 ms.
    """
    if dtype != "bfloat16" or device.type != "cpu":
        return []
    ratio = _matmul_seconds(torch.bfloat16) / _matmul_seconds(torch.float32)
    if ratio < 2:
        return []
    return [f"this CPU multiplies bfloat16 {ratio:.0f} times slower than float32: --dtype float32 would be faster"]


def _matmul_seconds(dtype: torch.dtype, size: int = 192, tries: int = 3) -> float:
    left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        torch.matmul(left, right)
        best = min(best, time.perf_counter() - start)
    return best


def _load_model(config: TargetConfig, description: TargetDescription, device: torch.device) -> tuple[Any, set[str]]:
    loader = auto_class(description)
    try:
        with quiet_transformers():
            model, info = loader.from_pretrained(
                config.name,
                revision=config.revision,
                trust_remote_code=config.trust_remote_code,
                dtype=DTYPES[description.dtype],
                attn_implementation=config.attention,
                output_loading_info=True,
            )
    except Exception as error:
        raise TargetError(f"target {config.name}: it cannot be loaded: {first_line(error)}") from error
    missing = set(info["missing_keys"])
    if missing:
        raise TargetError(
            f"target {config.name}: {len(missing)} weights are missing from its checkpoint, such as {min(missing)}: "
            "transformers would fill them with random numbers; fetch the model again"
        )
    try:
        model = model.to(device)
    except torch.OutOfMemoryError as error:
        raise TargetError(f"target {config.name}: it does not fit into the memory of {device}") from error
    model.eval()
    model.requires_grad_(False)
    return model, set(info["unexpected_keys"])


def attention_in_effect(text_config: Any, asked: str) -> str:
    """Return the attention implementation of a model that was built as asked, by its text configuration."""
    return str(getattr(text_config, "_attn_implementation", None) or asked)


def auto_class(description: TargetDescription) -> Any:
    """Return the transformers class that loads it. TargetError: there is none."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: PLC0415 - seconds
    from transformers.models.auto.modeling_auto import (  # noqa: PLC0415
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    own_code = getattr(description.config, "auto_map", None) or {}
    if "AutoModelForCausalLM" in own_code or type(description.config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(description.config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise TargetError(
        f"target {description.name}: transformers knows no causal language model of type "
        f"{description.config.model_type!r}; a newer transformers may"
    )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from writing warnings and progress bars."""
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415 - seconds

    logging: Any = transformers_logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _self_test_ids(description: TargetDescription) -> list[int]:
    ids = description.tokenizer(SELF_TEST_TEXT, add_special_tokens=False)["input_ids"]
    valid = [int(i) for i in ids if int(i) < description.vocab_size][:SELF_TEST_TOKENS]
    return valid or [i % description.vocab_size for i in range(SELF_TEST_TOKENS)]


def end_tokens(target: Target) -> frozenset[int]:
    """Return the tokens that end a reply: those of the generation configuration, else the tokenizer's."""
    generation = getattr(target.model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    ids = [found] if isinstance(found, int) else list(found or [])
    own = target.tokenizer.eos_token_id
    return frozenset(ids or ([] if own is None else [own]))
