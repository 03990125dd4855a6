"""The drafter's sizes, and their form in the config.json that z-lab's code, vLLM and SGLang read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, ConfigError

FULL = "full_attention"
SLIDING = "sliding_attention"
ARCHITECTURE = "DFlashDraftModel"
EXTRA_KEY = "dflash_pipeline"
"""The one key of config.json that is ours; other readers ignore it."""

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "num_target_layers",
)
_MAX_SIZE = 2**31
_ZLAB_NAMES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "num_target_layers": "num_target_layers",
}


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Everything that fixes the drafter's shape and meaning.

    `context_layer_ids` are the target's layers (0-based outputs) whose states feed `fc`, in the order of its
    columns; `layer_types` has one entry per drafter layer. Raises ConfigError where a value is not valid.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    context_layer_ids: tuple[int, ...]
    num_target_layers: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 32768

    def __post_init__(self) -> None:
        for name in _SIZES:
            _require_int(name, getattr(self, name), 1, _MAX_SIZE)
        _require_int("block_size", self.block_size, 2, 4096)
        _require_int("mask_token_id", self.mask_token_id, 0, self.vocab_size)
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a positive number, found {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary positions, found {self.head_dim}")
        self._check_context_layers()
        self._check_layer_types()

    def _check_context_layers(self) -> None:
        ids = self.context_layer_ids
        if not isinstance(ids, tuple) or not ids:
            raise ConfigError(f"context_layer_ids must name at least one layer of the target, found {ids!r}")
        for layer_id in ids:
            _require_int("context layer id", layer_id, 0, self.num_target_layers)
        if len(set(ids)) != len(ids):
            raise ConfigError(f"context_layer_ids must all differ, found {list(ids)}")

    def _check_layer_types(self) -> None:
        if not isinstance(self.layer_types, tuple) or len(self.layer_types) != self.num_layers:
            raise ConfigError(
                f"layer_types must have one entry for each of the {self.num_layers} layers, found {self.layer_types!r}"
            )
        unknown = sorted({str(kind) for kind in self.layer_types} - {FULL, SLIDING})
        if unknown:
            raise ConfigError(f"layer_types may hold {FULL} and {SLIDING}, found {', '.join(unknown)}")
        if SLIDING in self.layer_types:
            _require_int("sliding_window", self.sliding_window, 1, _MAX_SIZE)
        elif self.sliding_window is not None:
            raise ConfigError(f"sliding_window is {self.sliding_window!r}, but no layer is {SLIDING}: leave it out")

    @property
    def num_context_layers(self) -> int:
        """How many of the target's layers feed `fc`."""
        return len(self.context_layer_ids)

    def window(self, layer: int) -> int | None:
        """The sliding window of drafter layer `layer`; None for a full layer."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def to_zlab(self, dtype: str = "float32") -> dict[str, Any]:
        """Return config.json as z-lab's code, vLLM and SGLang read it (`dtype` names the weights' own)."""
        sliding = SLIDING in self.layer_types
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            **{theirs: getattr(self, ours) for ours, theirs in _ZLAB_NAMES.items()},
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window,
            "use_sliding_window": sliding,  # false makes Qwen3Config drop the window
            "max_window_layers": self.num_layers,
            "dtype": dtype,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "block_size": self.block_size,
            "dflash_config": {
                "target_layer_ids": list(self.context_layer_ids),
                "mask_token_id": self.mask_token_id,
                "block_size": self.block_size,
            },
        }
        if not sliding:
            config["is_causal"] = False  # left out with sliding layers: it would override their causality
        return config

    @classmethod
    def from_zlab(cls, config: Mapping[str, Any]) -> DrafterConfig:
        """Read a config.json of z-lab's layout; CheckpointError where it is incomplete or not understood."""
        inner = config.get("dflash_config")
        if not isinstance(inner, Mapping):
            raise CheckpointError("config.json has no dflash_config: which target layers feed the drafter is not known")
        _refuse_what_we_do_not_compute(config)
        layer_types = _layer_types(config)
        values: dict[str, Any] = {ours: _required(config, theirs) for ours, theirs in _ZLAB_NAMES.items()}
        layer_ids = _agreed(config, inner, "target_layer_ids")
        if not isinstance(layer_ids, list):
            raise CheckpointError(f"config.json: target_layer_ids must be a list, found {layer_ids!r}")
        try:
            result = cls(
                **values,
                block_size=_agreed(config, inner, "block_size"),
                mask_token_id=_agreed(config, inner, "mask_token_id"),
                context_layer_ids=tuple(layer_ids),
                layer_types=layer_types,
                sliding_window=config.get("sliding_window") if SLIDING in layer_types else None,
                rms_norm_eps=_required(config, "rms_norm_eps"),
                rope_theta=_rope_theta(config),
            )
        except ConfigError as error:
            raise CheckpointError(f"config.json: {error}") from error
        _check_causality(config, inner, result)
        return result


def _require_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high - 1}, found {value!r}")


def _required(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise CheckpointError(f"config.json has no {key}")
    return config[key]


def _agreed(config: Mapping[str, Any], inner: Mapping[str, Any], key: str) -> Any:
    """Return `key` from the top level or dflash_config; both, where both have it, must agree."""
    found = [part[key] for part in (config, inner) if part.get(key) is not None]
    if not found:
        raise CheckpointError(f"config.json has no {key}, neither at the top nor in dflash_config: it is never guessed")
    if found[0] != found[-1]:
        raise CheckpointError(f"config.json: {key} is {found[0]!r} at the top and {found[-1]!r} in dflash_config")
    return found[0]


def _refuse_what_we_do_not_compute(config: Mapping[str, Any]) -> None:
    """Refuse settings that would change the drafter's output and that this model does not have."""
    architectures = config.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise CheckpointError(f"config.json: architectures must be [{ARCHITECTURE!r}], found {architectures!r}")
    expected: dict[str, tuple[Any, ...]] = {
        "model_type": ("qwen3",),
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "rope_scaling": (None,),
    }
    for key, allowed in expected.items():
        if config.get(key) not in allowed:
            raise CheckpointError(f"config.json: {key} must be {allowed[0]!r}, found {config.get(key)!r}")
    inner = config["dflash_config"]
    scale = config.get("input_embedding_scale", inner.get("input_embedding_scale"))
    if scale not in (None, 1, 1.0):
        raise CheckpointError(f"config.json: input_embedding_scale {scale!r} is not supported, only 1")


def _layer_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    layer_types = config.get("layer_types")
    sliding = config.get("use_sliding_window", False)
    if layer_types is None and not sliding:
        count = _required(config, "num_hidden_layers")
        return (FULL,) * (count if isinstance(count, int) and 0 < count < 4096 else 0)
    if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
        raise CheckpointError(f"config.json: layer_types must be a list of names, found {layer_types!r}")
    if SLIDING in layer_types and not sliding:
        raise CheckpointError("config.json: layer_types has sliding layers but use_sliding_window is not true")
    return tuple(layer_types)


def _rope_theta(config: Mapping[str, Any]) -> Any:
    parameters = config.get("rope_parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise CheckpointError(f"config.json: rope_parameters must be an object, found {parameters!r}")
    parameters = parameters or {}
    kind = parameters.get("rope_type", "default")
    if kind != "default" or parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise CheckpointError(f"config.json: only plain rotary positions are supported, found {dict(parameters)!r}")
    return _agreed({"rope_theta": config.get("rope_theta")}, parameters, "rope_theta")


def _check_causality(config: Mapping[str, Any], inner: Mapping[str, Any], result: DrafterConfig) -> None:
    """Refuse an override under which a full layer would be causal or a sliding one would not."""
    for name, value in (("is_causal", config.get("is_causal")), ("dflash_config.causal", inner.get("causal"))):
        if value is not None and any((kind == SLIDING) != value for kind in result.layer_types):
            raise CheckpointError(
                f"config.json: {name} = {value!r} does not fit the layer types {sorted(set(result.layer_types))}: "
                "here sliding layers are causal within the block and full layers are not"
            )
