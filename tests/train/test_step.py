"""A training step equals a dense float64 reference, in loss and gradient, and every knob does what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_pipeline.drafter.model import DFlashDrafter, init_weights
from dflash_pipeline.errors import TrainingError
from dflash_pipeline.store import CacheReader, TargetHead, open_cache
from dflash_pipeline.train.config import ResolvedConfig
from dflash_pipeline.train.data import Pack, build_pack, open_steps
from dflash_pipeline.train.facts import resolve_for, training_rows
from dflash_pipeline.train.forward import TrainingForward
from dflash_pipeline.train.recipes import load_recipe
from dflash_pipeline.train.sampling import PackSpec
from dflash_pipeline.train.step import StepInput

CPU = torch.device("cpu")
SMALL = ["anchors_per_pack=12", "pack_tokens=400", "num_layers=2", "steps=10"]


class Bench:
    """One pack of the tiny cache under one recipe."""

    def __init__(self, cache: CacheReader, recipe: str, *overrides: str) -> None:
        self.cache = cache
        self.config: ResolvedConfig = resolve_for(load_recipe(recipe, [*SMALL, *overrides]), cache, None, CPU)
        head = cache.head()
        self.head: TargetHead = replace(
            head,
            embed_tokens=head.embed_tokens.float(),
            lm_head=None if head.lm_head is None else head.lm_head.float(),
            norm=head.norm.float(),
        )
        self.context_rms = torch.cat(
            [cache.channel_rms(layer) for layer in self.config.drafter.context_layer_ids]
        ).float()
        label = self.config.label_layer
        self.label_rms = None if label is None else cache.channel_rms(label).float()

    def pack(self) -> Pack:
        table = training_rows(self.cache, self.config.recipe.heldout_share)
        with open_steps(self.cache, table, self.config, first_step=0, num_workers=0) as packs:
            return next(packs)[0]

    def prepare(self, pack: Pack, step: int = 0) -> StepInput:
        return StepInput.prepare(pack, self.config, self.head, step, self.context_rms, self.label_rms, CPU)

    def model(self) -> DFlashDrafter:
        model = DFlashDrafter(self.config.drafter)
        init_weights(model, torch.Generator().manual_seed(0), std=0.05)
        return model


@pytest.fixture(scope="module")
def cache(tiny_cache: Path) -> CacheReader:
    return open_cache(tiny_cache)


def reference_loss(bench: Bench, pack: Pack, model: DFlashDrafter, labels: torch.Tensor) -> torch.Tensor:
    """Every anchor on its own, plain attention, dense logits, the weights written out."""
    head, size = bench.head, bench.config.drafter.block_size
    starts = pack.layout.row_offsets.tolist()
    total, weights = torch.zeros((), dtype=torch.float64), 0.0
    for number, anchor in enumerate(pack.layout.anchors.tolist()):
        start = max(s for s in starts[:-1] if s <= anchor)
        context = model.context_features(pack.states_TC[start:anchor].double())
        ids = [int(pack.tokens_T[anchor])] + [bench.config.drafter.mask_token_id] * (size - 1)
        from dflash_pipeline.drafter.layout import PackLayout

        layout = PackLayout.single_row(anchor - start, [anchor - start])
        hidden = model(head.embed_tokens.double()[ids], context, layout, attention="plain")
        log_probs = (hidden @ head.head_weight.double().T).log_softmax(1)
        for which in torch.nonzero(pack.supervision.slots_N2[:, 0] == number).flatten().tolist():
            k = int(pack.supervision.slots_N2[which, 1])
            weight = float(np.exp(-(k - 1) / bench.config.recipe.gamma))
            total = total - weight * log_probs[k, int(labels[which])]
            weights += weight
    return total / weights


@pytest.mark.parametrize("overrides", [(), ("sliding_layers=1", "sliding_window=9"), ("label_source=corpus",)])
def test_loss_and_gradients_equal_a_dense_float64_reference(cache: CacheReader, overrides: tuple[str, ...]) -> None:
    bench = Bench(cache, "default", *overrides)
    pack = bench.pack()
    given = bench.prepare(pack)
    plain = bench.model().double()
    expected = reference_loss(bench, pack, plain, given.labels_N)
    expected.backward()
    model = bench.model()
    total, _ = TrainingForward(model)(given, bench.head.embed_tokens, bench.head.head_weight)
    loss = total / given.weights_N.sum()
    loss.backward()
    assert abs(loss.item() - expected.item()) / expected.item() < 1e-5
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert float((ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()) < 1e-5, name


def test_labels_of_the_default_are_the_targets_stored_choice(cache: CacheReader) -> None:
    bench = Bench(cache, "default")
    pack = bench.pack()
    top = torch.cat([cache.read_row(row).top_ids[:, 0] for row in pack.spec.rows]).long()
    assert torch.equal(pack.supervision.labels_N, top[pack.supervision.sources_N])
    assert pack.label_states_NH is None


def test_labels_of_the_final_state_equal_the_targets_choice(cache: CacheReader) -> None:
    """The last state through the stored norm (weights far from 1) and head names what the live target names."""
    bench = Bench(cache, "default", "label_source=final")
    pack = bench.pack()
    top = torch.cat([cache.read_row(row).top_ids[:, 0] for row in pack.spec.rows]).long()
    assert torch.equal(bench.prepare(pack).labels_N, top[pack.supervision.sources_N])


def test_four_plus_one_reads_four_layers_and_is_asked_for_the_fifth(cache: CacheReader) -> None:
    bench, default = Bench(cache, "four-plus-one"), Bench(cache, "default")
    pack, whole = bench.pack(), default.pack()
    assert pack.spec == whole.spec
    assert torch.equal(pack.states_TC, whole.states_TC[:, : 4 * 64])
    fifth = torch.cat([cache.read_row(row).states[5] for row in pack.spec.rows])
    normed = torch.nn.functional.rms_norm(fifth, (64,), bench.head.norm, bench.head.norm_eps)
    expected = (normed @ bench.head.head_weight.T).argmax(1)[pack.supervision.sources_N]
    assert torch.equal(bench.prepare(pack).labels_N, expected)


def test_bug_shortcut_differs_from_its_parent_in_the_context_alone(cache: CacheReader) -> None:
    bug, parent, default = (Bench(cache, name) for name in ("bug-shortcut", "four-plus-one", "default"))
    assert torch.equal(bug.pack().states_TC, default.pack().states_TC)
    assert torch.equal(bug.prepare(bug.pack()).labels_N, parent.prepare(parent.pack()).labels_N)
    assert torch.equal(bug.prepare(bug.pack()).weights_N, parent.prepare(parent.pack()).weights_N)


def test_bug_noisy_labels_moves_labels_and_noise_without_it_does_not(cache: CacheReader) -> None:
    bug = Bench(cache, "bug-noisy-labels")
    noise_only = Bench(cache, "bug-noisy-labels", "noisy_labels=false")
    parent = Bench(cache, "four-plus-one")
    pack = parent.pack()
    clean, right, wrong = (bench.prepare(pack) for bench in (parent, noise_only, bug))
    assert torch.equal(right.labels_N, clean.labels_N)
    assert torch.equal(right.teacher_NH, clean.teacher_NH)
    assert not torch.equal(right.states_TC, clean.states_TC)
    assert torch.equal(right.states_TC, wrong.states_TC)
    assert not torch.equal(wrong.labels_N, clean.labels_N)
    assert torch.equal(wrong.weights_N, clean.weights_N)


def test_bug_soft_kl_changes_the_loss_and_the_weights_alone(cache: CacheReader) -> None:
    bug, parent = Bench(cache, "bug-soft-kl"), Bench(cache, "four-plus-one")
    pack = bug.pack()
    given, clean = bug.prepare(pack), parent.prepare(parent.pack())
    assert torch.equal(given.states_TC, clean.states_TC)
    assert torch.equal(given.labels_N, clean.labels_N)
    k = pack.supervision.slots_N2[:, 1].float()
    torch.testing.assert_close(given.weights_N, torch.exp(-(k - 1) / 10))
    model = bug.model()
    hidden, head = [], bug.head
    model.norm.register_forward_hook(lambda _module, _inputs, output: hidden.append(output))
    recipe = bug.config.recipe
    forward = TrainingForward(model, kl_weight=recipe.kl_weight, kl_temperature=recipe.kl_temperature)
    total, _ = forward(given, head.embed_tokens, head.head_weight)
    loss = total / given.weights_N.sum()
    logits = hidden[0][given.slots_N] @ head.head_weight.T
    p = (given.teacher_NH @ head.head_weight.T / 2).softmax(1)
    soft = 4 * (p * (p.log() - (logits / 2).log_softmax(1))).sum(1)
    hard = torch.nn.functional.cross_entropy(logits, given.labels_N, reduction="none")
    expected = (given.weights_N * (0.7 * soft + 0.3 * hard)).sum() / given.weights_N.sum()
    torch.testing.assert_close(loss, expected)


def test_zlab_differs_in_block_and_gamma_alone(cache: CacheReader) -> None:
    bench = Bench(cache, "zlab")
    pack = bench.pack()
    assert bench.config.drafter.block_size == 16
    k = pack.supervision.slots_N2[:, 1].float()
    torch.testing.assert_close(pack.supervision.weights_N, torch.exp(-(k - 1) / 7))
    assert torch.equal(pack.states_TC, Bench(cache, "default").pack().states_TC)


def test_states_at_and_after_an_anchor_change_none_of_its_logits(cache: CacheReader) -> None:
    bench = Bench(cache, "default")
    pack = bench.pack()
    given, model = bench.prepare(pack), bench.model()
    anchor = len(pack.layout.anchors) // 2
    position = int(pack.layout.anchors[anchor])
    end = int(pack.layout.row_offsets[pack.layout.rows[anchor] + 1])
    moved = given.states_TC.clone()
    moved[position:end] += 1e3
    outputs = []
    for states in (given.states_TC, moved):
        embeds = bench.head.embed_tokens[given.block_tokens_AB.flatten()]
        outputs.append(model(embeds, model.context_features(states), pack.layout).unflatten(0, (-1, 8)))
    assert torch.equal(outputs[0][anchor], outputs[1][anchor])
    assert not torch.equal(outputs[0], outputs[1])


def test_a_row_that_uses_the_mask_token_is_named(cache: CacheReader) -> None:
    used = int(cache.read_row(0).tokens[0])
    bench = Bench(cache, "default", f"mask_token_id={used}")
    with pytest.raises(TrainingError, match=f"row {cache.row_ids[0]}: .* --set mask_token_id=ID"):
        build_pack([cache.read_row(0)], PackSpec(epoch=0, rows=(0,), quotas=(1,)), bench.config)


def test_packs_are_the_same_with_and_without_workers(cache: CacheReader) -> None:
    bench = Bench(cache, "default")
    table = training_rows(cache, 0.05)
    cache.read_row(0)  # an earlier read in the parent
    streams = []
    for workers in (0, 1, 4):
        with open_steps(cache, table, bench.config, first_step=3, num_workers=workers) as packs:
            streams.append([next(packs)[0] for _ in range(12)])
    for other in streams[1:]:
        for ours, theirs in zip(streams[0], other, strict=True):
            assert ours.spec == theirs.spec
            assert torch.equal(ours.states_TC, theirs.states_TC)
            assert torch.equal(ours.layout.anchors, theirs.layout.anchors)
