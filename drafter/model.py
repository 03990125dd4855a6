"""The DFlash drafter: a Qwen3-style transformer whose blocks read the target's hidden states as context.

Source: arXiv 2602.06036; module names are those of z-lab's checkpoints. Embeddings and head are the target's and
belong to the caller.

Axes: T context tokens, A anchors, B block, N = A*B block tokens, K context layers of the target, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .attention import Attend, KeyValue, Scope, choose_attention
from .config import DrafterConfig
from .layout import PackLayout

CosSin = tuple[Tensor, Tensor]
"""Rotary factors [N, 1, head size / 2] of N positions."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, computed in float32 at least, returned in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        out = nn.functional.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps)
        return out.to(x.dtype)


def rotary(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> CosSin:
    """Return cos and sin [N, 1, head_dim / 2] of the angles at `positions` [N], computed in float32."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos_sin: CosSin) -> Tensor:
    """Rotate the two halves of each head's axis of `x` [N, heads, head_dim] by the angles."""
    cos, sin = cos_sin
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    """Queries from the block; keys and values from the context features and the block."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        size, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.block_size = config.block_size
        self.window = config.window(layer)
        self.q_proj = nn.Linear(size, config.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(size, config.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(size, config.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head_dim, size, bias=False)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)

    def key_value(self, x: Tensor, cos_sin: CosSin) -> KeyValue:
        """Return rotated keys and values of `x` [N, H]; context features come as they are, without a layer norm."""
        values = self._heads(self.v_proj(x))
        keys = rotate(self.k_norm(self._heads(self.k_proj(x))), cos_sin)
        return keys.to(values.dtype), values

    def forward(self, x: Tensor, context: KeyValue, cos_sin: CosSin, layout: PackLayout, attend: Attend) -> Tensor:
        """Attend from block tokens `x` [N, H] (after the layer norm)."""
        keys, values = self.key_value(x, cos_sin)
        queries = rotate(self.q_norm(self._heads(self.q_proj(x))), cos_sin).to(values.dtype)
        out: Tensor = self.o_proj(attend(queries, context, (keys, values), Scope(layout, self.block_size, self.window)))
        return out


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the gated layer."""
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, context: KeyValue, cos_sin: CosSin, layout: PackLayout, attend: Attend) -> Tensor:
        """Update block tokens `x` [N, H]."""
        x = x + self.self_attn(self.input_layernorm(x), context, cos_sin, layout, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DFlashDrafter(nn.Module):
    """The drafter. Its parameters carry exactly z-lab's names; it has no buffers, embeddings or head."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.num_context_layers * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def context_features(self, states: Tensor) -> Tensor:
        """Return [T, H] from the target's states [T, K*H], columns in the order of `context_layer_ids`."""
        out: Tensor = self.hidden_norm(self.fc(states))
        return out

    def context_key_values(self, context: Tensor, positions: Tensor) -> list[KeyValue]:
        """Return each layer's keys and values of context features [T, H] at `positions` [T].

        They do not depend on any anchor, so decoding computes them once per token (`ContextCache`).
        """
        cos_sin = self._rotary(positions, context)
        return [layer.self_attn.key_value(context, cos_sin) for layer in self._attention_layers()]

    def empty_context(self) -> list[KeyValue]:
        """Return keys and values of no context at all: a block at the very start of a row."""
        empty = self.fc.weight.new_empty(0, self.config.num_kv_heads, self.config.head_dim)
        return [(empty, empty)] * self.config.num_layers

    def forward(self, block_embeds: Tensor, context: Tensor, layout: PackLayout, attention: str = "auto") -> Tensor:
        """Return the final hidden states [A*B, H] of all blocks; logits are these times the target's head.

        block_embeds: [A*B, H], embed(anchor token), then B-1 times embed(mask), anchor by anchor.
        context: [T, H] from `context_features`. attention: auto, plain, segment or flex.
        """
        if context.shape[0] != layout.num_tokens:
            raise ConfigError(f"context has {context.shape[0]} tokens, the layout {layout.num_tokens}")
        return self.blocks(block_embeds, self.context_key_values(context, layout.positions), layout, attention)

    def blocks(
        self, block_embeds: Tensor, context: Sequence[KeyValue], layout: PackLayout, attention: str = "auto"
    ) -> Tensor:
        """`forward` from ready keys and values of the context."""
        size = self.config.block_size
        if block_embeds.shape[0] != layout.num_anchors * size:
            raise ConfigError(f"{block_embeds.shape[0]} block tokens for {layout.num_anchors} anchors of {size} slots")
        attend = choose_attention(attention, block_embeds.device)
        cos_sin = self._rotary(layout.slot_positions(size), block_embeds)
        x = block_embeds
        for layer, key_value in zip(self.layers, context, strict=True):
            x = layer(x, key_value, cos_sin, layout, attend)
        out: Tensor = self.norm(x)
        return out

    def _attention_layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def _rotary(self, positions: Tensor, like: Tensor) -> CosSin:
        wide = torch.promote_types(like.dtype, torch.float32)
        return rotary(positions.to(like.device), self.config.head_dim, self.config.rope_theta, wide)


@torch.no_grad()
def init_weights(model: DFlashDrafter, generator: torch.Generator, std: float = 0.02) -> None:
    """Draw every matrix from N(0, std^2), in the order of the parameters' names, and set every norm to 1."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0, std, generator=generator)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.fill_(1)


@torch.no_grad()
def init_from_statistics(model: DFlashDrafter, channel_rms: Tensor, head_std: float) -> None:
    """Fit fresh weights to the scale of the target: a pure initialisation, no new tensor.

    fc's columns are divided by the RMS of their input channel, since a few channels of a hidden state hold nearly all
    its energy; the final norm becomes 1 / (head_std * sqrt(H)), so that the logits of a state which has nothing to do
    with the head have about unit variance. A fresh slot's state is near the embedding of its input, the mask token:
    under a head that is tied to the embeddings, that token's own logit starts at |its embedding| / head_std, and the
    first loss is as high.

    channel_rms: [K*H], at least 0; a channel that is always zero keeps its column. head_std: of the target's
    head. Raises ConfigError where they do not fit. Source: ours, measured on SmolLM2.
    """
    hidden_size = model.config.hidden_size
    if channel_rms.shape != (model.fc.in_features,) or not bool(
        (torch.isfinite(channel_rms) & (channel_rms >= 0)).all()
    ):
        raise ConfigError(f"channel_rms must be {model.fc.in_features} finite numbers of at least 0")
    if not head_std > 0:
        raise ConfigError(f"head_std must be positive, found {head_std}")
    scale = torch.where(channel_rms > 0, channel_rms, torch.ones_like(channel_rms))
    model.fc.weight /= scale.to(model.fc.weight)
    model.norm.weight.fill_(1 / (head_std * hidden_size**0.5))
