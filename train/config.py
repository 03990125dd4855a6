"""How the settings of a recipe that depend on the cache are resolved.

`None` in a `Recipe` means "from the cache": `resolve` turns a recipe and the facts of one cache into a `ResolvedConfig`
in which nothing is open, and that is what a run saves.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ..drafter.config import DrafterConfig
from ..errors import ConfigError
from .mask_token import TokenizerFacts, choose_mask_token
from .recipe import Recipe

LARGE_HIDDEN, SMALL_HIDDEN = 2048, 768
LARGE_LR, SMALL_LR = 6e-4, 2e-3
LARGE_PACK, SMALL_PACK = (4096, 256), (1024, 64)
"""Tokens and anchors of a step."""
PAPER_WARMUP_STEPS = 2801


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


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
