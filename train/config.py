"""What a recipe may set, and how the settings that depend on the cache are resolved.

A `Recipe` holds every key that a recipe file or `--set` may give. `None` means "from the cache": `resolve` turns a
recipe and the facts of one cache into a `ResolvedConfig` in which nothing is open, and that is what a run saves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from ..drafter.config import DrafterConfig
from ..errors import ConfigError
from .mask_token import TokenizerFacts, choose_mask_token

LARGE_HIDDEN, SMALL_HIDDEN = 2048, 768
LARGE_LR, SMALL_LR = 6e-4, 2e-3
LARGE_PACK, SMALL_PACK = (4096, 256), (1024, 64)
"""Tokens and anchors of a step."""
PAPER_WARMUP_STEPS = 2801

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


@dataclass(frozen=True, kw_only=True)
class CacheFacts:
    """What `resolve` needs to know of a cache: no more than the manifest, the plan and two small JSON files say."""

    identity: str
    fingerprint: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    has_final: bool
    dtype: str
    num_train_tokens: int
    num_train_shards: int
    longest_reply_tokens: int
    target_config: dict[str, Any]
    tokenizer: TokenizerFacts


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """A recipe with nothing left open, and the drafter it makes. `as_dict` is what a run saves and compares."""

    recipe: Recipe
    drafter: DrafterConfig
    label_layer: int | None
    pack_tokens: int
    anchors_per_pack: int
    packs_per_step: int
    steps: int
    lr: float
    warmup_steps: int
    eval_every: int
    checkpoint_every: int
    precision: str
    target_dtype: str
    cache_identity: str
    cache_fingerprint: str

    @property
    def label_kind(self) -> str:
        """`corpus`, `target`, `final` or `layer`."""
        return self.recipe.label_source.partition(":")[0]

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def resolve(recipe: Recipe, facts: CacheFacts, precision: str, packs_per_step: int = 1) -> ResolvedConfig:
    """Fill in what a recipe leaves to the cache; `packs_per_step` counts where the recipe does not say.

    Raises:
        ConfigError: the cache lacks what the recipe asks for, or context and label layers overlap.
    """
    label_layer = _label_layer(recipe, facts)
    drafter = _drafter_config(recipe, facts, _context_layers(recipe, facts, label_layer))
    if drafter.block_size > 2 * facts.longest_reply_tokens:
        raise ConfigError(
            f"block_size = {drafter.block_size}: no training row fills even half a block, the longest reply has "
            f"{facts.longest_reply_tokens} tokens; set a smaller block_size, or extract rows with longer replies"
        )
    pack_tokens, anchors_per_pack = LARGE_PACK if facts.hidden_size >= LARGE_HIDDEN else SMALL_PACK
    pack_tokens = recipe.pack_tokens or pack_tokens
    packs_per_step = recipe.packs_per_step or packs_per_step
    if packs_per_step > facts.num_train_shards:
        raise ConfigError(
            f"packs_per_step = {packs_per_step}: each pack of a step comes from shards of its own, and the cache has "
            f"{facts.num_train_shards}; set fewer, or extract with a smaller --shard-tokens"
        )
    tokens_per_step = pack_tokens * packs_per_step
    steps = recipe.steps or max(1, math.ceil(recipe.epochs * facts.num_train_tokens / tokens_per_step))
    warmup = min(PAPER_WARMUP_STEPS, math.ceil(0.04 * steps)) if recipe.warmup_steps is None else recipe.warmup_steps
    if warmup > steps:
        raise ConfigError(f"warmup_steps = {warmup}: more than steps = {steps}")
    return ResolvedConfig(
        recipe=recipe,
        drafter=drafter,
        label_layer=label_layer,
        pack_tokens=pack_tokens,
        anchors_per_pack=recipe.anchors_per_pack or anchors_per_pack,
        packs_per_step=packs_per_step,
        steps=steps,
        lr=recipe.lr or default_lr(facts.hidden_size),
        warmup_steps=warmup,
        eval_every=recipe.eval_every or max(1, math.ceil(steps / 6)),
        checkpoint_every=recipe.checkpoint_every or max(1, math.ceil(steps / 5)),
        precision=precision,
        target_dtype=facts.dtype,
        cache_identity=facts.identity,
        cache_fingerprint=facts.fingerprint,
    )


def default_lr(hidden_size: int) -> float:
    """Return the peak learning rate: 6e-4 from hidden 2,048 up, 2e-3 up to hidden 768, geometric in between."""
    position = math.log(hidden_size / SMALL_HIDDEN) / math.log(LARGE_HIDDEN / SMALL_HIDDEN)
    position = min(1.0, max(0.0, position))
    return float(f"{SMALL_LR * (LARGE_LR / SMALL_LR) ** position:.3g}")


def _label_layer(recipe: Recipe, facts: CacheFacts) -> int | None:
    kind, _, layer = recipe.label_source.partition(":")
    if kind == "final" and not facts.has_final:
        raise ConfigError("label_source = final: this cache holds no final states; extract with --keep-final")
    if kind != "layer":
        return None
    label = facts.layer_ids[-1] if layer == "last" else int(layer)
    if label not in facts.layer_ids:
        raise ConfigError(f"label_source = {recipe.label_source}: the cache holds layers {list(facts.layer_ids)}")
    return label


def _context_layers(recipe: Recipe, facts: CacheFacts, label_layer: int | None) -> tuple[int, ...]:
    if recipe.context_layers == "all":
        layers = facts.layer_ids
    elif recipe.context_layers == "all-but-label":
        if label_layer is None:
            raise ConfigError("context_layers = all-but-label needs label_source = layer:last or layer:ID")
        layers = tuple(layer for layer in facts.layer_ids if layer != label_layer)
    else:
        layers = tuple(int(layer) for layer in recipe.context_layers)
    if not layers or len(set(layers)) != len(layers) or not set(layers) <= set(facts.layer_ids):
        raise ConfigError(
            f"context_layers = {list(layers)}: expected different ids among the cache's layers {list(facts.layer_ids)}"
        )
    if label_layer in layers and not recipe.allow_shortcut:
        raise ConfigError(
            f"layer {label_layer} is both the label state and a context layer, so the drafter would read its own "
            "answer; use context_layers = all-but-label, or set allow_shortcut = true to measure what that costs"
        )
    return layers


def _drafter_config(recipe: Recipe, facts: CacheFacts, context_layers: tuple[int, ...]) -> DrafterConfig:
    text = facts.target_config.get("text_config") or facts.target_config

    def size(name: str, key: str, fallback: int | None = None) -> int:
        value = getattr(recipe, name, None) or text.get(key) or fallback
        if not isinstance(value, int):
            raise ConfigError(f"the target's config has no {key}; pass --set {name}=N")
        return value

    num_heads = size("num_heads", "num_attention_heads")
    rope = text.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    return DrafterConfig(
        hidden_size=facts.hidden_size,
        intermediate_size=size("intermediate_size", "intermediate_size"),
        num_layers=recipe.num_layers,
        num_heads=num_heads,
        num_kv_heads=size("num_kv_heads", "num_key_value_heads", num_heads),
        head_dim=size("head_dim", "head_dim", facts.hidden_size // num_heads),
        vocab_size=facts.vocab_size,
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or text.get("rope_theta") or 10000.0),
        max_position_embeddings=size("max_position_embeddings", "max_position_embeddings"),
        block_size=recipe.block_size or (16 if facts.hidden_size >= LARGE_HIDDEN else 8),
        mask_token_id=choose_mask_token(recipe.mask_token_id, facts.tokenizer, facts.vocab_size),
        context_layer_ids=context_layers,
        num_target_layers=size("num_target_layers", "num_hidden_layers"),
        layer_types=("sliding_attention",) * recipe.sliding_layers
        + ("full_attention",) * (recipe.num_layers - recipe.sliding_layers),
        sliding_window=recipe.sliding_window,
    )


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


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
