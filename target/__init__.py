"""The frozen language model whose states are cached: loading, finding its parts, self-test, capture."""

from __future__ import annotations

from .capture import Capture, capture
from .describe import TargetConfig, TargetDescription, describe_target
from .layers import check_layer_ids, default_layer_ids, parse_layer_ids
from .loading import Target, attention_in_effect, end_tokens, load_target
from .stored import stored_weights

__all__ = [
    "Capture",
    "Target",
    "TargetConfig",
    "TargetDescription",
    "attention_in_effect",
    "capture",
    "check_layer_ids",
    "default_layer_ids",
    "describe_target",
    "end_tokens",
    "load_target",
    "parse_layer_ids",
    "stored_weights",
]
