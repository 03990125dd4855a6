"""What a recipe may set: every key that a recipe file or `--set` may give, its type and its range.

`None` means "from the cache", which config.py resolves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from ..errors import ConfigError

Shard = Literal["none", "full"]
Tracker = Literal["none", "tensorboard", "trackio", "wandb"]
NoiseKind = Literal["none", "uniform", "gaussian"]
NoiseSchedule = Literal["constant", "linear", "cosine"]
Precision = Literal["auto", "float32", "bfloat16"]

CHOICES: dict[str, tuple[str, ...]] = {
    "Shard": get_args(Shard), "Tracker": get_args(Tracker), "NoiseKind": get_args(NoiseKind),
    "NoiseSchedule": get_args(NoiseSchedule), "Precision": get_args(Precision),
}  # fmt: skip
LABEL_SOURCES = "corpus, target, final, layer:last or layer:ID"
CONTEXT_LAYERS = "all, all-but-label or a list of ids"

_Range = tuple[str, Callable[[float], bool]]
_ABOVE_0: _Range = ("above 0", lambda value: 0 < value < math.inf)
_FROM_0: _Range = ("from 0 up", lambda value: 0 <= value < math.inf)
_BELOW_1: _Range = ("from 0 to below 1", lambda value: 0 <= value < 1)
RANGES: dict[str, _Range] = {
    **dict.fromkeys(("noise_scale", "weight_decay", "sliding_layers", "warmup_steps"), _FROM_0),
    "seed": ("from 0 to below 2^32", lambda value: 0 <= value < 2**32),
    **dict.fromkeys(("beta1", "beta2", "heldout_share"), _BELOW_1),
    "kl_weight": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "block_size": ("of at least 2 (the anchor and one drafted token)", lambda value: value >= 2),
    "mask_token_id": ("", lambda _value: True),
}
"""What a number may be, in words and as a check: above 0, but for these. The mask token's range is the vocabulary's."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a training run. See docs/recipes.md for the meaning and the source of every default.

    Raises:
        ConfigError: a value is outside its range, or two settings contradict each other.
    """

    # the drafter
    num_layers: int = 5
    block_size: int | None = None
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    sliding_layers: int = 0
    sliding_window: int | None = None
    mask_token_id: int | None = None
    # what it reads and what it is asked for
    context_layers: str | tuple[int, ...] = "all"
    label_source: str = "target"
    allow_shortcut: bool = False
    gamma: float = 4.0
    kl_weight: float = 0.0
    kl_temperature: float = 1.0
    # noise
    noise_kind: NoiseKind = "none"
    noise_scale: float = 0.0
    noise_schedule: NoiseSchedule = "constant"
    noisy_labels: bool = False
    # the optimiser
    steps: int | None = None
    epochs: float = 6.0
    lr: float | None = None
    warmup_steps: int | None = None
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    precision: Precision = "auto"
    seed: int = 0
    # the packs
    pack_tokens: int | None = None
    anchors_per_pack: int | None = None
    shuffle_tokens: int = 32768
    packs_per_step: int | None = None
    shard: Shard = "none"
    # held-out rows and checkpoints
    heldout_share: float = 0.05
    eval_every: int | None = None
    eval_rows: int = 16
    checkpoint_every: int | None = None
    checkpoint_minutes: float = 10.0
    keep_checkpoints: int = 2
    tracker: Tracker = "none"

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_value(field.name, str(field.type), getattr(self, field.name))
        if self.steps is not None and self.epochs != Recipe.epochs:
            raise ConfigError(f"epochs = {self.epochs} has no effect with steps = {self.steps}: set one of them")
        self._check_noise()
        self._check_labels()
        if self.sliding_layers > self.num_layers:
            raise ConfigError(f"sliding_layers = {self.sliding_layers}: more than num_layers = {self.num_layers}")
        if (self.sliding_layers > 0) != (self.sliding_window is not None):
            raise ConfigError("sliding_layers and sliding_window go together: set both, or neither")

    def _check_noise(self) -> None:
        if (self.noise_kind == "none") != (self.noise_scale == 0):
            raise ConfigError(
                f"noise_kind = {self.noise_kind!r} with noise_scale = {self.noise_scale}: set both, or neither"
            )
        if self.noise_kind == "none" and self.noise_schedule != "constant":
            raise ConfigError(f"noise_schedule = {self.noise_schedule!r} has no effect without noise_kind")
        if self.noisy_labels and self.noise_kind == "none":
            raise ConfigError("noisy_labels = true has no effect without noise_kind and noise_scale")

    def _check_labels(self) -> None:
        if self.label_source not in ("corpus", "target", "final"):
            kind, _, layer = self.label_source.partition(":")
            if kind != "layer" or not (layer == "last" or layer.isdecimal()):
                raise ConfigError(f"label_source = {self.label_source!r}: expected {LABEL_SOURCES}")
        from_state = self.label_source not in ("corpus", "target")
        if self.kl_weight and not from_state:
            raise ConfigError(f"kl_weight needs a label state (layer:... or final); label_source = {self.label_source}")
        if self.kl_temperature != 1 and not self.kl_weight:
            raise ConfigError(f"kl_temperature = {self.kl_temperature} has no effect with kl_weight = 0")
        if self.noisy_labels and not from_state:
            raise ConfigError(f"noisy_labels needs a label state (layer:... or final), not {self.label_source!r}")
        if isinstance(self.context_layers, str) and self.context_layers not in ("all", "all-but-label"):
            raise ConfigError(f"context_layers = {self.context_layers!r}: expected {CONTEXT_LAYERS}")


def _check_value(name: str, kind: str, value: Any) -> None:
    """Refuse a value that is not of its setting's type or range; `kind` is the type as it is written above."""
    if value is None and "None" in kind:
        return
    base = kind.removesuffix(" | None")
    if base in CHOICES:
        right = value in CHOICES[base]
    elif base in ("int", "float"):
        right = type(value) is int or (base == "float" and type(value) is float)
        right = right and RANGES.get(name, _ABOVE_0)[1](value)
    elif base == "bool":
        right = type(value) is bool
    else:  # context_layers, label_source: text, or for the former a list of ids
        right = isinstance(value, str) or (
            "tuple" in base and isinstance(value, tuple) and all(type(layer) is int for layer in value)
        )
    if not right:
        shown = json.dumps(value, ensure_ascii=False, default=str)
        raise ConfigError(f"{name} = {shown}: expected {_expected(name, base)}")


def _expected(name: str, base: str) -> str:
    """Return in words what a setting takes."""
    if base in CHOICES:
        return f"one of {', '.join(CHOICES[base])}"
    if base in ("int", "float"):
        return f"a {'whole ' if base == 'int' else ''}number {RANGES.get(name, _ABOVE_0)[0]}".strip()
    return {"bool": "true or false", "str": LABEL_SOURCES}.get(base, CONTEXT_LAYERS)
