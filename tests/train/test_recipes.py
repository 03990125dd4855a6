"""Recipes: parents, overrides, refusals, and that each sets what its name says and nothing else."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_pipeline.errors import ConfigError
from dflash_pipeline.train.config import CacheFacts, default_lr, resolve
from dflash_pipeline.train.facts import whole_block_share
from dflash_pipeline.train.mask_token import TokenizerFacts
from dflash_pipeline.train.parallel import Ranks
from dflash_pipeline.train.progress import describe_run
from dflash_pipeline.train.recipe import Recipe
from dflash_pipeline.train.recipes import load_recipe, recipe_names
from dflash_pipeline.train.sampling import RowTable

TOKENIZER = TokenizerFacts(size=1000, special={}, mask=None, used=frozenset(), template="")
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
}


def facts(**changes: object) -> CacheFacts:
    values = {
        "identity": "i",
        "fingerprint": "f",
        "layer_ids": (1, 2, 3, 4, 5),
        "hidden_size": 64,
        "vocab_size": 1024,
        "has_final": False,
        "dtype": "float32",
        "num_train_tokens": 100_000,
        "num_train_shards": 8,
        "longest_reply_tokens": 500,
        "target_config": CONFIG,
        "tokenizer": TOKENIZER,
    }
    return CacheFacts(**{**values, **changes})


def changed(name: str, parent: str) -> dict[str, object]:
    ours, theirs = asdict(load_recipe(name)), asdict(load_recipe(parent))
    return {key: value for key, value in ours.items() if value != theirs[key]}


def test_the_six_recipes_are_there() -> None:
    assert recipe_names() == ["bug-noisy-labels", "bug-shortcut", "bug-soft-kl", "default", "four-plus-one", "zlab"]


def test_default_is_the_recipe_of_the_code() -> None:
    assert load_recipe("default") == Recipe()


@pytest.mark.parametrize(
    ("name", "parent", "keys"),
    [
        ("zlab", "default", {"block_size": 16, "gamma": 7.0}),
        ("four-plus-one", "default", {"context_layers": "all-but-label", "label_source": "layer:last"}),
        ("bug-shortcut", "four-plus-one", {"context_layers": "all", "allow_shortcut": True}),
        ("bug-soft-kl", "four-plus-one", {"kl_weight": 0.7, "kl_temperature": 2.0, "gamma": 10.0}),
        (
            "bug-noisy-labels",
            "four-plus-one",
            {"noise_kind": "uniform", "noise_scale": 0.5, "noise_schedule": "linear", "noisy_labels": True},
        ),
    ],
)
def test_a_recipe_changes_its_own_keys_and_no_other(name: str, parent: str, keys: dict[str, object]) -> None:
    assert changed(name, parent) == keys


def test_overrides_are_toml_values_or_bare_words() -> None:
    recipe = load_recipe("default", ["lr=3e-4", "label_source=corpus", "context_layers=[1, 3]", "allow_shortcut=true"])
    assert (recipe.lr, recipe.label_source, recipe.context_layers) == (3e-4, "corpus", (1, 3))


def test_a_file_recipe_follows_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('parent = "bug-soft-kl"\ngamma = 5.0\n', encoding="utf-8")
    assert (load_recipe(str(path)).gamma, load_recipe(str(path)).kl_weight) == (5.0, 0.7)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("gama=3", "did you mean gamma"),
        ("gamma", "expected key=value"),
        ("gamma=-1", "gamma = -1: expected a number above 0$"),
        ("gamma=soft", 'gamma = "soft": expected a number above 0$'),
        ("lr=abc", 'lr = "abc": expected a number above 0$'),
        ("lr=nan", "lr = NaN: expected a number above 0$"),
        ("lr=true", "lr = true: expected a number above 0$"),
        ("lr=[1, 2]", r"lr = \[1, 2\]: expected a number above 0$"),
        ("lr=2020-01-01", 'lr = "2020-01-01": expected a number above 0$'),
        ("steps=1.5", "steps = 1.5: expected a whole number above 0$"),
        ("warmup_steps=-1", "warmup_steps = -1: expected a whole number from 0 up$"),
        ("mask_token_id=none", 'mask_token_id = "none": expected a whole number$'),
        ("allow_shortcut=yes", 'allow_shortcut = "yes": expected true or false$'),
        ("kl_weight=2", "kl_weight = 2: expected a number from 0 to 1$"),
        ("label_source=3", "label_source = 3: expected corpus, target, final, layer:last or layer:ID$"),
        ('context_layers=["a"]', r'context_layers = \["a"\]: expected all, all-but-label or a list of ids$'),
        ("tracker=paper", 'tracker = "paper": expected one of none, tensorboard, trackio, wandb$'),
        ("noise_scale=0.5", "set both, or neither"),
        ("noisy_labels=true", "no effect without noise_kind"),
        ("label_source=layer:last", None),
        ("label_source=logits", "expected corpus, target"),
        ("kl_weight=0.5", "needs a label state"),
        ("kl_temperature=2", "no effect"),
        ("noise_kind=pink", "expected one of"),
        ("sliding_layers=2", "go together"),
        ("block_size=1", "at least 2"),
        ("heldout_share=1", "expected a number from 0 to below 1"),
        ("precision=fp8", "expected one of"),
        ("seed=true", "seed = true: expected a whole number from 0 to below 2\\^32$"),
        ("seed=4294967296", "seed = 4294967296: expected a whole number from 0 to below 2\\^32$"),
    ],
)
def test_what_a_recipe_cannot_do_is_refused_with_the_reason(override: str, message: str | None) -> None:
    if message is None:
        load_recipe("default", [override])
    else:
        with pytest.raises(ConfigError, match=message):
            load_recipe("default", [override])


def test_unknown_and_circular_parents_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "loop.toml"
    path.write_text(f'parent = "{path}"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="its own parent"):
        load_recipe(str(path))
    with pytest.raises(ConfigError, match="expected a TOML file or one of"):
        load_recipe("nonesuch")


def test_the_label_layer_among_the_context_layers_is_refused_unless_allowed() -> None:
    with pytest.raises(ConfigError, match="its own answer"):
        resolve(load_recipe("default", ["label_source=layer:5"]), facts(), "float32")
    assert resolve(load_recipe("bug-shortcut"), facts(), "float32").drafter.context_layer_ids == (1, 2, 3, 4, 5)
    plus_one = resolve(load_recipe("four-plus-one"), facts(), "float32")
    assert (plus_one.drafter.context_layer_ids, plus_one.label_layer) == ((1, 2, 3, 4), 5)


def test_what_the_cache_lacks_is_refused() -> None:
    for override, message in (
        ("label_source=layer:7", "the cache holds layers"),
        ("label_source=final", "--keep-final"),
        ("context_layers=[1, 9]", "among the cache's layers"),
        ("context_layers=[1, 1]", "different ids"),
        ("mask_token_id=1024", "rows 0 to 1023"),
        ("warmup_steps=100000", "more than steps"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve(load_recipe("default", [override]), facts(), "float32")


def test_sizes_come_from_the_text_config_of_a_wrapper_too() -> None:
    flat, nested = (resolve(Recipe(), facts(target_config=c), "float32") for c in (CONFIG, {"text_config": CONFIG}))
    assert flat == nested
    assert (flat.drafter.head_dim, flat.drafter.num_kv_heads, flat.drafter.rope_theta) == (32, 2, 1e7)
    assert (flat.drafter.block_size, flat.lr, flat.steps) == (8, 2e-3, 586)
    assert flat.warmup_steps == 24


def test_large_targets_get_block_16_the_papers_rate_and_its_warmup() -> None:
    big = resolve(
        load_recipe("default", ["steps=100000"]), facts(hidden_size=2048, target_config={**CONFIG}), "float32"
    )
    assert (big.drafter.block_size, big.lr, big.warmup_steps) == (16, 6e-4, 2801)
    assert (big.pack_tokens, big.anchors_per_pack) == (4096, 256)
    assert default_lr(768) == default_lr(64) == 2e-3
    assert default_lr(5120) == 6e-4
    assert 6e-4 < default_lr(1024) < 2e-3


def test_a_block_that_no_reply_fills_by_half_is_refused() -> None:
    for block_size, longest in ((1000, 499), (17, 8), (3, 1)):
        with pytest.raises(ConfigError, match=rf"block_size = {block_size}: .* longest reply has {longest} tokens"):
            resolve(Recipe(block_size=block_size), facts(longest_reply_tokens=longest), "float32")
        resolve(Recipe(block_size=block_size), facts(longest_reply_tokens=longest + 1), "float32")


def test_the_share_of_whole_blocks_counts_anchors_whose_reply_goes_on_to_the_end_of_their_block() -> None:
    replies = np.array([2, 5, 8, 9, 30])
    rows = RowTable(index=np.arange(5), num_tokens=replies + 3, num_anchors=replies - 1, shard=np.zeros(5, dtype=int))
    for block_size in (2, 5, 8, 16, 100):
        anchors = [(a, length) for length in replies.tolist() for a in range(length - 1)]
        whole = sum(a + block_size <= length for a, length in anchors)
        assert whole_block_share(rows, block_size) == whole / len(anchors)


def test_a_run_says_at_its_start_how_many_anchors_fill_their_block() -> None:
    for share, hint in (
        (0.93, "anchors have a reply that fills their whole block"),
        (0.2, "a smaller block_size would"),
    ):
        said: list[str] = []
        describe_run(resolve(Recipe(), facts(), "float32"), Ranks(0, 1, torch.device("cpu")), share, said.append)
        assert said[-1].startswith(f"blocks: up to {share:.0%} of the anchors ")
        assert hint in said[-1]
        assert ("a smaller" in said[-1]) == (share < 0.5)


def test_sliding_layers_come_first_and_carry_their_window() -> None:
    drafter = resolve(load_recipe("default", ["sliding_layers=4", "sliding_window=64"]), facts(), "float32").drafter
    assert drafter.layer_types == ("sliding_attention",) * 4 + ("full_attention",)
    assert drafter.sliding_window == 64
