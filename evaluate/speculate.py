"""Speculative decoding of one row with a drafter: draft a block, let the target verify it in one step, go on.

The order of things is that of the offline walk: the first new token is the target's own and is not counted; then
each verification emits the accepted drafts and one token of the target's, cut at the end token and at the limit.

Axes: B block, n tokens of a step, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..drafter.draft import ContextCache
from ..drafter.model import DFlashDrafter
from ..drafter.walk import RowWalk
from ..target import Target
from ..target.decode import TargetDecoder
from .measure import FrozenHead
from .sampling import sample, verify_sampled
from .trees import Tree, grow_tree

NEAR_CHOICES = 4


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Where a row ends: after any of the `eos_ids`, or after `max_new_tokens` new tokens, whichever is first."""

    max_new_tokens: int
    eos_ids: frozenset[int]

    def cut(self, done: Sequence[int], new: Sequence[int]) -> list[int]:
        """Return of the `new` tokens those that may still follow the `done` ones."""
        room = list(new[: self.max_new_tokens - len(done)])
        ends = [index for index, token in enumerate(room) if token in self.eos_ids]
        return room[: ends[0] + 1] if ends else room

    def reached(self, done: Sequence[int]) -> bool:
        """Whether nothing may follow."""
        return len(done) >= self.max_new_tokens or done[-1] in self.eos_ids


@dataclass(eq=False)
class Decoded:
    """One decoded row: its new tokens, the walk of its verifications, the seconds it took, prompt included.

    `finish_reason`: stop or length. `near` is filled by plain decoding alone: per new token, ids and logits of the
    target's first choices.
    """

    tokens: list[int] = field(default_factory=list)
    walk: RowWalk = field(default_factory=lambda: RowWalk([], [], []))
    seconds: float = 0.0
    near: list[tuple[list[int], list[float]]] = field(default_factory=list)
    finish_reason: str = "length"

    def finish(self, limits: Limits, started: float) -> Decoded:
        """Note why and when it ended."""
        self.finish_reason = "stop" if self.tokens[-1] in limits.eos_ids else "length"
        self.seconds = time.perf_counter() - started
        return self


Choose = Callable[[Tensor], int]
"""From logits [V] to a token."""


def decode_plainly(target: Target, prompt: Sequence[int], limits: Limits, choose: Choose | None = None) -> Decoded:
    """Decode token by token; greedily, noting the first choices, unless `choose` says otherwise."""
    started = time.perf_counter()
    decoder, out = TargetDecoder(target), Decoded()
    logits = decoder.extend(prompt, last_only=True).logits[0]
    while True:
        if choose is None:
            values, ids = logits.float().topk(min(NEAR_CHOICES, len(logits)))
            out.near.append((ids.tolist(), values.tolist()))
        out.tokens.append(choose(logits) if choose else int(logits.argmax()))
        if limits.reached(out.tokens):
            return out.finish(limits, started)
        logits = decoder.extend(out.tokens[-1:]).logits[0]


@dataclass(frozen=True, eq=False)
class Speculator:
    """A target, a drafter and the target's head where the drafter is."""

    target: Target
    model: DFlashDrafter
    head: FrozenHead

    def greedy(self, prompt: Sequence[int], limits: Limits, tree_budget: int | None = None) -> Decoded:
        """Decode greedily, verifying the chain of the most likely drafts, or a tree of at most `tree_budget` nodes."""
        started = time.perf_counter()
        decoder, context, out = self._begin(prompt, lambda logits: int(logits.argmax()))
        while not limits.reached(out.tokens):
            room = min(limits.max_new_tokens - len(out.tokens), self.model.config.block_size - 1)
            tree = self._draft(context, out.tokens[-1], room, tree_budget)
            parents = None if tree.is_chain else [-1, *(parent + 1 for parent in tree.parents)]
            step = decoder.extend([out.tokens[-1], *tree.tokens], parents=parents)
            choices = step.logits.argmax(-1).tolist()
            path = _accepted_path(tree, choices)
            new = limits.cut(
                out.tokens, [*(tree.tokens[place] for place in path), choices[path[-1] + 1 if path else 0]]
            )
            path = path[: len(new)]
            kept = [0, *(place + 1 for place in path)]
            if parents is None:
                decoder.keep(len(prompt) + len(out.tokens) + len(path))
            else:
                decoder.keep_path(kept)
            context.append(step.states[kept])
            _note(out, len(prompt), len(path), new)
        return out.finish(limits, started)

    def sampled(self, prompt: Sequence[int], limits: Limits, temperature: float, source: torch.Generator) -> Decoded:
        """Decode by sampling from the target at a temperature; the drafter changes the speed, not the distribution."""
        started = time.perf_counter()
        decoder, context, out = self._begin(prompt, sample_at(temperature, source))
        while not limits.reached(out.tokens):
            room = min(limits.max_new_tokens - len(out.tokens), self.model.config.block_size - 1)
            guesses = _softmax(self._slot_logits(context, out.tokens[-1])[:room], temperature)
            drafts = [sample(guess, source) for guess in guesses]
            step = decoder.extend([out.tokens[-1], *drafts])
            accepted, following = verify_sampled(_softmax(step.logits, temperature), guesses, drafts, source)
            new = limits.cut(out.tokens, [*drafts[:accepted], following])
            accepted = min(accepted, len(new))
            decoder.keep(len(prompt) + len(out.tokens) + accepted)
            context.append(step.states[: accepted + 1])
            _note(out, len(prompt), accepted, new)
        return out.finish(limits, started)

    def _begin(self, prompt: Sequence[int], choose: Choose) -> tuple[TargetDecoder, ContextCache, Decoded]:
        decoder, context = TargetDecoder(self.target, self.model.config.context_layer_ids), ContextCache(self.model)
        step = decoder.extend(prompt, last_only=True)
        context.append(step.states)
        return decoder, context, Decoded(tokens=[choose(step.logits[0])])

    def _draft(self, context: ContextCache, anchor: int, room: int, tree_budget: int | None) -> Tree:
        if tree_budget == 0:
            return Tree([], [])
        logits = self._slot_logits(context, anchor)
        if tree_budget is not None:
            return grow_tree(logits, tree_budget)
        return Tree(logits[:room].argmax(-1).tolist(), list(range(-1, room - 1)))

    @torch.inference_mode()
    def _slot_logits(self, context: ContextCache, anchor: int) -> Tensor:
        """Return [B-1, V] logits of the slots after the anchor token."""
        hidden = context.hidden(self.head.embed_tokens, anchor)[1:]
        return nn.functional.linear(hidden, self.head.weight)


def _accepted_path(tree: Tree, choices: Sequence[int]) -> list[int]:
    """Return the places of the drafts that the target would have written, from the anchor down.

    choices: [1 + nodes], the target's token after the anchor and after each node. Children of one node differ.
    """
    path: list[int] = []
    at = -1
    for place, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent == at and token == choices[at + 1]:
            path.append(place)
            at = place
    return path


def _note(out: Decoded, prompt_tokens: int, accepted: int, new: Sequence[int]) -> None:
    out.walk.anchors.append(prompt_tokens + len(out.tokens) - 1)
    out.walk.accepted.append(accepted)
    out.walk.emitted.append(len(new))
    out.tokens += new


def sample_at(temperature: float, source: torch.Generator) -> Choose:
    """Return a choice that draws from the softmax of logits / temperature."""
    return lambda logits: sample(_softmax(logits, temperature), source)


def _softmax(logits: Tensor, temperature: float) -> Tensor:
    return (logits.float() / temperature).softmax(-1)
