"""Speculative decoding writes what plain decoding writes, whatever the drafts; a hybrid target too."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from dflash_pipeline.drafter.config import DrafterConfig
from dflash_pipeline.drafter.draft import ContextCache
from dflash_pipeline.drafter.model import DFlashDrafter, init_weights
from dflash_pipeline.evaluate.lossless import compare
from dflash_pipeline.evaluate.measure import FrozenHead
from dflash_pipeline.evaluate.speculate import Decoded, Limits, Speculator, decode_plainly, sample_at
from dflash_pipeline.store import TargetHead
from dflash_pipeline.target import Target, TargetConfig, load_target

BLOCK = 8
PROMPTS = [torch.randint(1, 1000, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 4, 23)]
NO_END = frozenset[int]()
DRAFTER = DrafterConfig(
    hidden_size=64,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=1024,
    block_size=BLOCK,
    mask_token_id=1000,
    context_layer_ids=(4, 1),
    num_target_layers=8,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=6,
)


def varied(place: int) -> int:
    """A depth from 0 to B-1 for every place."""
    return random.Random(place).randrange(BLOCK)


def speculator(target: Target, config: DrafterConfig = DRAFTER, kind: type[Speculator] = Speculator) -> Speculator:
    model = DFlashDrafter(config)
    init_weights(model, torch.Generator().manual_seed(1), std=0.3)
    embed_tokens, lm_head, norm, eps = target.head_tensors()
    head = TargetHead(embed_tokens=embed_tokens, lm_head=lm_head, norm=norm, norm_eps=eps)
    return kind(target, model.eval(), FrozenHead.of(head, model.fc.weight))


class Prescient(Speculator):
    """A drafter whose wishes come true to a random depth: right for as many slots as `depth` says, then wrong."""

    known: list[int]
    depth: Callable[[int], int]

    def _slot_logits(self, context: ContextCache, anchor: int) -> Tensor:
        place = context.num_tokens  # the anchor stands right after the cached tokens
        assert self.known[place] == anchor
        logits = torch.randn(BLOCK - 1, 1024, generator=torch.Generator().manual_seed(place))
        right = self.depth(place)
        for slot, token in enumerate(self.known[place + 1 : place + BLOCK]):
            logits[slot, token] = 9.0 if slot < right else -9.0
        return logits


@pytest.fixture(scope="module")
def flat(tiny_target_dir: Path) -> Target:
    return load_target(TargetConfig(name=str(tiny_target_dir), device="cpu"))


@pytest.fixture(scope="module")
def hybrid(tiny_hybrid_dir: Path) -> Target:
    return load_target(TargetConfig(name=str(tiny_hybrid_dir), device="cpu"))


@pytest.mark.parametrize("name", ["flat", "hybrid"])
def test_any_number_of_accepted_drafts_leaves_the_text_as_it_is(name: str, request: pytest.FixtureRequest) -> None:
    target: Target = request.getfixturevalue(name)
    decoder = speculator(target, kind=Prescient)
    limits = Limits(max_new_tokens=120, eos_ids=NO_END)
    seen: Counter[int] = Counter()
    for prompt in PROMPTS:
        plain = decode_plainly(target, prompt, limits)
        assert len(plain.tokens) == 120
        object.__setattr__(decoder, "known", prompt + plain.tokens)
        object.__setattr__(decoder, "depth", varied)
        out = decoder.greedy(prompt, limits)
        assert out.tokens == plain.tokens
        assert out.walk.tokens == 119
        assert out.finish_reason == "length"
        position = len(prompt)
        for anchor, accepted, emitted in zip(out.walk.anchors, out.walk.accepted, out.walk.emitted, strict=True):
            left = len(prompt) + 120 - 1 - anchor
            assert anchor == position
            assert accepted == min(varied(anchor), left)
            assert emitted == min(accepted + 1, left)
            position += emitted
            seen[accepted] += 1
    assert set(seen) == set(range(BLOCK))


@pytest.mark.parametrize("budget", [0, 1, 5, 24])
def test_a_tree_leaves_the_text_as_it_is_and_accepts_no_less_than_its_chain(flat: Target, budget: int) -> None:
    decoder = speculator(flat, kind=Prescient)
    limits = Limits(max_new_tokens=60, eos_ids=NO_END)
    for prompt in PROMPTS:
        plain = decode_plainly(flat, prompt, limits)
        object.__setattr__(decoder, "known", prompt + plain.tokens)
        object.__setattr__(decoder, "depth", varied)
        out = decoder.greedy(prompt, limits, budget)
        assert out.tokens == plain.tokens
        if budget == 0:
            assert out.walk.accepted == [0] * 59
        for anchor, accepted in zip(out.walk.anchors, out.walk.accepted, strict=True):
            assert accepted >= min(varied(anchor), budget, len(prompt) + 59 - anchor)


def test_a_real_drafter_and_its_trees_leave_the_text_as_it_is(flat: Target, hybrid: Target) -> None:
    limits = Limits(max_new_tokens=16, eos_ids=NO_END)
    for prompt in PROMPTS[1:]:
        plain = decode_plainly(flat, prompt, limits).tokens
        assert [speculator(flat).greedy(prompt, limits, budget).tokens for budget in (None, 12)] == [plain] * 2
        assert speculator(hybrid).greedy(prompt, limits).tokens == decode_plainly(hybrid, prompt, limits).tokens


@pytest.mark.parametrize("ahead", [0, 1, 3, 6, 7, 9])
@pytest.mark.parametrize("budget", [None, 12])
def test_a_reply_ends_at_its_first_end_token_even_amid_accepted_drafts(
    flat: Target, ahead: int, budget: int | None
) -> None:
    prompt = PROMPTS[1]
    whole = decode_plainly(flat, prompt, Limits(max_new_tokens=60, eos_ids=NO_END)).tokens
    place = next(p for p in range(ahead, 60) if whole.index(whole[p]) == p)
    limits = Limits(max_new_tokens=60, eos_ids=frozenset([whole[place], 1023]))
    decoder = speculator(flat, kind=Prescient)
    object.__setattr__(decoder, "known", prompt + whole)
    object.__setattr__(decoder, "depth", lambda _: BLOCK - 1)
    plain = decode_plainly(flat, prompt, limits)
    out = decoder.greedy(prompt, limits, budget)
    assert plain.tokens == out.tokens == whole[: place + 1]
    assert (plain.finish_reason, out.finish_reason) == ("stop", "stop")
    assert out.walk.tokens == place
    assert all(
        accepted <= emitted <= accepted + 1
        for accepted, emitted in zip(out.walk.accepted, out.walk.emitted, strict=True)
    )


def test_a_row_that_differs_is_a_tie_only_where_the_target_was_undecided() -> None:
    def plain(*values: float) -> Decoded:
        return Decoded(tokens=[5, 6, 7], near=[([5, 1], [9.0, 1.0]), ([6, 8], list(values)), ([7, 1], [9.0, 1.0])])

    same, other, far = Decoded(tokens=[5, 6, 7]), Decoded(tokens=[5, 8, 2]), Decoded(tokens=[5, 9, 7])
    rows = [plain(16.0, 15.0), plain(16.0, 15.875), plain(16.0, 15.0), plain(16.0, 15.0)]
    found = compare(["a", "b", "c", "d"], rows, [same, other, other, far], torch.bfloat16)
    assert found["lossless"] is False
    assert found["differences"] == {"ties": 1, "other": 2}
    assert found["different_rows"] == [
        {"id": "b", "token": 1, "distance": 0.125, "tie": True},
        {"id": "c", "token": 1, "distance": 1.0, "tie": False},
        {"id": "d", "token": 1, "distance": None, "tie": False},
    ]
    assert compare(["b"], rows[1:2], [other], torch.float32)["differences"] == {"ties": 0, "other": 1}
    assert compare(["a"], rows[:1], [same], torch.float32)["lossless"] is True


def test_sampling_through_a_drafter_has_the_targets_joint_distribution(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    """500 replies over a vocabulary of 4, against the probabilities that the target itself gives."""
    vocab, runs, prompt = 4, 500, [1, 3, 2]
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=vocab, head_dim=32, num_key_value_heads=1, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.08)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_tokenizer_dir).save_pretrained(tmp_path)
    target = load_target(TargetConfig(name=str(tmp_path), device="cpu"))
    config = replace(
        DRAFTER, vocab_size=vocab, block_size=3, mask_token_id=3, context_layer_ids=(0,), num_target_layers=2
    )
    decoder, limits = speculator(target, config), Limits(max_new_tokens=3, eos_ids=NO_END)
    with torch.no_grad():
        rows = torch.tensor([[*prompt, first] for first in range(vocab)])
        logits = target.model(rows).logits / 0.7
    first, second = logits[0, 2].softmax(-1), logits[:, 3].softmax(-1)
    source = torch.Generator().manual_seed(5)
    counts, plain, accepted = Counter[tuple[int, int]](), Counter[int](), Counter[int]()
    for _ in range(runs):
        out = decoder.sampled(prompt, limits, 0.7, source)
        counts[out.tokens[0], out.tokens[1]] += 1
        accepted[out.walk.accepted[0]] += 1
        plain[
            decode_plainly(target, prompt, Limits(max_new_tokens=1, eos_ids=NO_END), sample_at(0.7, source)).tokens[0]
        ] += 1
    assert min(accepted[count] for count in range(3)) > 20
    expected = {(a, b): runs * float(first[a] * second[a, b]) for a in range(vocab) for b in range(vocab)}
    assert sum((counts[pair] - value) ** 2 / value for pair, value in expected.items()) < 37.7  # 15 degrees, 0.1%
    assert sum((plain[a] - runs * float(first[a])) ** 2 / (runs * float(first[a])) for a in range(vocab)) < 16.3
