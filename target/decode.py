"""Decoding with the target, step by step: a cache of keys and values that a rejected draft can be taken back from.

Layers of full attention are cut. All others (linear attention, convolutions, sliding windows) cannot be cut once a
token is in: they are copied before each step, put back, and the tokens that stay are run once more.

Axes: n new tokens, P tokens before them, K context layers, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError, TargetError
from .capture import captured_states
from .loading import Target
from .selftest import TOLERANCE

CHECK_TOKENS = 12


class Step(NamedTuple):
    """What the target returns for n tokens: logits [n, V] (or [1, V] of the last) and the wanted states [n, K*H]."""

    logits: Tensor
    states: Tensor


class TargetDecoder:
    """One row being decoded. Start another row with another decoder; the weights are shared.

    Attributes:
        tokens: the ids in the cache, prompt included.
        layer_ids: the layers whose states `extend` returns, in this order; may be empty.
    """

    def __init__(self, target: Target, layer_ids: Sequence[int] = ()) -> None:
        from transformers import DynamicCache  # noqa: PLC0415 - seconds

        self.tokens: list[int] = []
        self.layer_ids = tuple(layer_ids)
        self._target = target
        self._cache: Any = DynamicCache(config=target.config)
        self._cache_name = cache_argument(target)
        self._before: tuple[int, dict[int, Any]] | None = None  # (tokens, copies of the layers that cannot be cut)

    @property
    def can_branch(self) -> bool:
        """Whether all layers are of full attention, so that a tree of drafts can be run in one step."""
        plain_mask = getattr(self._target.config, "_attn_implementation", None) in ("sdpa", "eager")
        return plain_mask and all(_can_be_cut(layer) for layer in self._cache.layers)

    def require_branching(self) -> None:
        """Raise ConfigError where `can_branch` is false."""
        if not self.can_branch:
            raise ConfigError(
                f"target {self._target.name}: it has layers of linear or sliding attention, or an attention "
                "implementation without masks, so a tree of drafts cannot be verified in one step: decode without "
                "--tree-budget"
            )

    @torch.no_grad()
    def extend(self, ids: Sequence[int], *, parents: Sequence[int] | None = None, last_only: bool = False) -> Step:
        """Run new tokens after those in the cache, and keep them until `keep` or `keep_path` says otherwise.

        Args:
            ids: n token ids, at least one.
            parents: for a tree, the index among `ids` of each token's parent, -1 for the root's; a parent comes before
                its children. A token sees the cache, its ancestors and itself. None: one after the other.
            last_only: return the last token's logits alone; a long prompt needs no others.

        Raises:
            ConfigError: a tree where `can_branch` is false.
            TargetError: the step does not fit into the device's memory.
        """
        start = len(self.tokens)
        options: dict[str, Any] = {}
        if parents is not None:
            self.require_branching()
            depths = _depths(parents)
            options["position_ids"] = torch.tensor([[start + depth for depth in depths]], device=self._target.device)
            options["attention_mask"] = _tree_mask(parents, start, self._target.dtype).to(self._target.device)
        self._before = (start, self._copies())
        try:
            step = self._run(ids, last_only, options)
        except torch.OutOfMemoryError as error:
            raise TargetError(
                f"target {self._target.name}: {start + len(ids)} tokens do not fit into the memory of "
                f"{self._target.device}: use a smaller --max-new-tokens"
            ) from error
        self.tokens += ids
        return step

    @torch.no_grad()
    def keep(self, num_tokens: int) -> None:
        """Take back all tokens from position `num_tokens` on; they must be of the last step."""
        if num_tokens == len(self.tokens):
            return
        start, copies = self._before or (len(self.tokens), {})
        if not start <= num_tokens <= len(self.tokens):
            raise ConfigError(f"{num_tokens} tokens to keep: the last step took {start} to {len(self.tokens)}")
        stay = self.tokens[start:num_tokens]
        for index, layer in enumerate(self._cache.layers):
            if index in copies:
                self._cache.layers[index] = copies[index]
            elif layer.get_seq_length():
                _select(layer, slice(0, start if copies else num_tokens))
        self.tokens = self.tokens[:num_tokens]
        self._before = None
        if copies and stay:
            self._run(stay, True, {})

    def keep_path(self, path: Sequence[int]) -> None:
        """Of the last step, a tree, keep the tokens at these indices, a path from the root down."""
        start, _ = self._before or (len(self.tokens), {})
        places = torch.tensor([*range(start), *(start + index for index in path)], device=self._target.device)
        for layer in self._cache.layers:
            _select(layer, places)
        self.tokens = [self.tokens[place] for place in places.tolist()]
        self._before = None

    def _copies(self) -> dict[int, Any]:
        """Copy the layers that cannot be cut."""
        layers = self._cache.layers
        return {index: copy.deepcopy(layer) for index, layer in enumerate(layers) if not _can_be_cut(layer)}

    def _run(self, ids: Sequence[int], last_only: bool, options: dict[str, Any]) -> Step:
        parts = self._target.parts
        inputs = torch.tensor([list(ids)], dtype=torch.int64, device=self._target.device)
        with captured_states(parts, set(self.layer_ids)) as states:
            arguments = {**options, self._cache_name: self._cache}
            hidden = parts.base(input_ids=inputs, use_cache=True, **arguments).last_hidden_state[0]
        logits = parts.lm_head(hidden[-1:] if last_only else hidden)
        wanted = [states[layer][0] for layer in self.layer_ids]
        return Step(logits, torch.cat(wanted, dim=1) if wanted else hidden.new_empty(len(ids), 0))


def cache_argument(target: Target) -> str:
    """Return what this model calls the argument that takes its cache; releases of transformers differ."""
    parameters = inspect.signature(type(target.parts.base).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def check_decoding(target: Target) -> None:
    """Check on a few tokens that steps with a cache, one taken back among them, give what one whole forward gives.

    Raises:
        TargetError: they do not, so speculative decoding would change this target's output.
    """
    ids = [(7 * index + 3) % target.vocab_size for index in range(CHECK_TOKENS)]
    whole = TargetDecoder(target).extend(ids).logits.float()
    stepped = TargetDecoder(target)
    stepped.extend(ids[:4])
    stepped.extend(ids[4:7] + ids[:3])
    stepped.keep(6)
    logits = torch.cat([stepped.extend(ids[6:11]).logits, stepped.extend(ids[11:]).logits]).float()
    error = float((logits - whole[6:]).norm() / whole[6:].norm())
    if not error <= 4 * TOLERANCE[target.dtype]:
        raise TargetError(
            f"target {target.name}: decoding in steps of several tokens does not give the logits of one forward "
            f"(relative error {error:.1e}): its cache cannot go on after a rejected draft with this transformers; a "
            "newer one may"
        )


def _can_be_cut(layer: Any) -> bool:
    from transformers.cache_utils import DynamicLayer  # noqa: PLC0415 - seconds

    return type(layer) is DynamicLayer


def _select(layer: Any, places: Tensor | slice) -> None:
    """Keep these positions of a layer of full attention."""
    layer.keys, layer.values = layer.keys[..., places, :], layer.values[..., places, :]


def _depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for index, parent in enumerate(parents):
        if not -1 <= parent < index:
            raise ConfigError(f"node {index} of a tree has parent {parent}: expected an earlier node, or -1")
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _tree_mask(parents: Sequence[int], start: int, dtype: torch.dtype) -> Tensor:
    """Return [1, 1, n, P + n]: 0 on the cache, a token's ancestors and itself, the dtype's least value elsewhere."""
    sees = torch.zeros(len(parents), start + len(parents), dtype=torch.bool)
    for index, parent in enumerate(parents):
        if parent >= 0:
            sees[index] = sees[parent]
        else:
            sees[index, :start] = True
        sees[index, start + index] = True
    return torch.zeros(sees.shape, dtype=dtype).masked_fill(~sees, torch.finfo(dtype).min)[None, None]
