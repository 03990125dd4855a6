"""Finding the parts of a causal language model: decoder layers, final norm, embeddings, head, text configuration.

Flat models keep them under `model`; multimodal wrappers nest them (`model.language_model`, `config.text_config`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import TargetError

LAYER_NAMES = ("layers", "h", "blocks")
NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
SOFT_CAP_NAMES = ("final_logit_softcapping", "logits_soft_cap")


@dataclass(frozen=True)
class Parts:
    """The modules of a target that extraction touches.

    `base` is called with token ids and returns the state after `norm`; `lm_head` maps that state to logits.
    """

    base: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    embed_tokens: nn.Module
    lm_head: nn.Module
    text_config: Any

    @property
    def embed_weight(self) -> Tensor:
        """The embedding matrix [V, H]."""
        return _weight(self.embed_tokens, "embedding")

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix [V, H]; the embedding matrix itself where they are tied."""
        return _weight(self.lm_head, "head")

    @property
    def tied(self) -> bool:
        """Whether head and embeddings are one tensor."""
        return self.head_weight.data_ptr() == self.embed_weight.data_ptr()


def find_parts(model: Any) -> Parts:
    """Return the parts of a Hugging Face causal language model, flat or nested in a multimodal wrapper.

    Raises:
        TargetError: a part cannot be found, has an unexpected shape, or changes the logits in a way that a reader of
            the cache would not know of (soft cap, head bias).
    """
    text_config = model.config.get_text_config(decoder=True)
    decoder = model.get_decoder()
    layers = _find_layers(decoder, int(text_config.num_hidden_layers))
    norm = _first(decoder, NORM_NAMES)
    if norm is None:
        raise TargetError(f"{_name(model)}: found no final norm (looked for {', '.join(NORM_NAMES)})")
    embed_tokens, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    if embed_tokens is None or lm_head is None:
        missing = "input embeddings" if embed_tokens is None else "output head"
        raise TargetError(f"{_name(model)}: it has no {missing}; a causal language model has both")
    if model.base_model is model:
        raise TargetError(f"{_name(model)}: its body cannot be called apart from its head")
    parts = Parts(model.base_model, layers, norm, embed_tokens, lm_head, text_config)
    _check(model, parts)
    return parts


def _check(model: Any, parts: Parts) -> None:
    hidden_size = int(parts.text_config.hidden_size)
    for name, weight in (("embedding", parts.embed_weight), ("head", parts.head_weight)):
        if weight.ndim != 2 or weight.shape[1] != hidden_size:
            raise TargetError(
                f"{_name(model)}: the {name} matrix is {list(weight.shape)}, expected [vocabulary, {hidden_size}]"
            )
    if parts.embed_weight.shape != parts.head_weight.shape:
        raise TargetError(
            f"{_name(model)}: {parts.embed_weight.shape[0]} embedding rows but {parts.head_weight.shape[0]} head rows"
        )
    if getattr(parts.lm_head, "bias", None) is not None:
        raise TargetError(f"{_name(model)}: its head has a bias, which the cache format cannot carry")
    for name in SOFT_CAP_NAMES:
        if getattr(parts.text_config, name, None):
            raise TargetError(
                f"{_name(model)}: it caps its logits ({name} = {getattr(parts.text_config, name)}), which the cache "
                "format cannot carry; such targets are not supported"
            )


def _find_layers(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    layers = _first(decoder, LAYER_NAMES)
    if not isinstance(layers, nn.ModuleList):
        raise TargetError(f"{_name(decoder)}: found no list of decoder layers (looked for {', '.join(LAYER_NAMES)})")
    if len(layers) != num_layers:
        raise TargetError(f"{_name(decoder)}: {len(layers)} decoder layers, but its configuration says {num_layers}")
    return layers


def _first(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    return next((found for name in names if isinstance(found := getattr(module, name, None), nn.Module)), None)


def _weight(module: nn.Module, what: str) -> Tensor:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise TargetError(f"the {what} ({_name(module)}) has no plain floating-point weight; is the model quantised?")
    return weight


def _name(module: nn.Module) -> str:
    return type(module).__name__
