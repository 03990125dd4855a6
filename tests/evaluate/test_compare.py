"""A/B: the same rows and anchors for both, an interval that means what it says, and refusals with reasons."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from dflash_pipeline.drafter.checkpoint import save_drafter
from dflash_pipeline.drafter.model import DFlashDrafter
from dflash_pipeline.drafter.walk import micro_tau
from dflash_pipeline.errors import ConfigError
from dflash_pipeline.evaluate.bootstrap import micro_tau_interval, paired_difference_interval
from dflash_pipeline.evaluate.measure import FrozenHead, measure_pack
from dflash_pipeline.evaluate.offline import EvaluateConfig, run_evaluate
from dflash_pipeline.evaluate.render import render_evaluation
from dflash_pipeline.store import Row, TargetHead, open_cache
from dflash_pipeline.store.splits import heldout_rows


def evaluate(drafter: Path, against: Path, cache: Path, **options: object) -> dict[str, Any]:
    config = EvaluateConfig(drafter=drafter, against=against, cache=cache, device="cpu", **options)
    result = run_evaluate(config, lambda _: None)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    return result


def saved(path: Path, model: DFlashDrafter, **extra: object) -> Path:
    save_drafter(path, model, extra=extra or None)
    return path


def test_a_drafter_against_itself_differs_by_nothing_and_the_interval_covers_zero(
    tmp_path: Path, drafter: DFlashDrafter, cache_dir: Path
) -> None:
    one = saved(tmp_path / "one", drafter)
    result = evaluate(one, one, cache_dir)
    found = result["against"]
    assert (found["tau"], found["difference"], found["ci95"]) == (result["tau"]["micro"], 0.0, [0.0, 0.0])
    assert found["per_slot_accuracy"] == result["per_slot_accuracy"]
    assert found["slot_difference"] == [0.0] * 7
    assert found["rows"] == result["rows"] == 20
    assert found["anchors"] == int(open_cache(cache_dir).num_anchors.sum())


@pytest.mark.parametrize(
    "changes",
    [{"block_size": 4}, {"context_layer_ids": (1, 4, 6)}, {"context_layer_ids": (6,), "block_size": 12}],
)
def test_other_blocks_and_context_layers_are_compared_on_the_same_rows(
    kit: SimpleNamespace,
    tmp_path: Path,
    drafter: DFlashDrafter,
    head: TargetHead,
    rows: list[Row],
    cache_dir: Path,
    changes: dict[str, object],
) -> None:
    other = kit.random_drafter(**changes)
    result = evaluate(saved(tmp_path / "a", drafter), saved(tmp_path / "b", other), cache_dir)
    walks = measure_pack(other, FrozenHead.of(head, other.fc.weight), rows).walks
    found = result["against"]
    assert found["tau"] == micro_tau(walks)
    assert found["difference"] == result["tau"]["micro"] - micro_tau(walks)
    assert found["ci95"][0] < found["difference"] < found["ci95"][1]
    assert (found["block_size"], len(found["per_slot_accuracy"])) == (
        other.config.block_size,
        other.config.block_size - 1,
    )
    assert len(found["slot_difference"]) == min(8, other.config.block_size) - 1
    assert found["rows"] == 20
    back = evaluate(tmp_path / "b", tmp_path / "a", cache_dir)["against"]
    assert back["difference"] == -found["difference"]
    assert back["ci95"] == pytest.approx([-found["ci95"][1], -found["ci95"][0]], abs=1e-12)
    stream = io.StringIO()
    render_evaluation(result, Console(file=stream, width=200))
    assert "better" in stream.getvalue()  # the rows were written so that the first one is right


def test_what_is_held_out_from_one_drafter_alone_is_not_compared(
    kit: SimpleNamespace, tmp_path: Path, drafter: DFlashDrafter, cache_dir: Path
) -> None:
    cache = open_cache(cache_dir)
    record = {"cache_identity": cache.identity}
    wide = saved(tmp_path / "wide", drafter, **record, heldout_share=0.6)
    narrow = saved(tmp_path / "narrow", drafter, **record, heldout_share=0.3)
    foreign = saved(tmp_path / "foreign", drafter)
    both = int(heldout_rows(cache.prompt_hash, 0.3).sum())
    assert 0 < both < int(heldout_rows(cache.prompt_hash, 0.6).sum())
    for one, other in ((wide, narrow), (narrow, wide), (narrow, foreign), (foreign, narrow)):
        result = evaluate(one, other, cache_dir)
        assert (result["split"], result["rows"], result["against"]["rows"]) == ("heldout", both, both)
    assert evaluate(wide, narrow, cache_dir, split="all")["rows"] == 20
    none = saved(tmp_path / "none", drafter, **record, heldout_share=0.0)
    with pytest.raises(ConfigError, match="no row is held out from both drafters"):
        evaluate(wide, none, cache_dir)


@pytest.mark.parametrize(
    ("extra", "changes", "message"),
    [
        ({"tokenizer_hash": "f" * 32}, {}, r"other: trained for another tokenizer \(tokenizer_hash ffff.*comparable"),
        ({"target_fingerprint": "f" * 32, "target_dtype": "float32"}, {}, "another target"),
        ({}, {"hidden_size": 48}, "hidden size 32, the drafter's is 48: they are of different targets"),
        ({}, {"vocab_size": 91}, "vocabulary 90, the drafter's is 91"),
        ({}, {"context_layer_ids": (1, 5)}, r"reads layers \[1, 5\], the cache holds \[1, 4, 6\]"),
    ],
)
def test_drafters_that_are_not_comparable_are_refused_with_the_reason(
    kit: SimpleNamespace,
    tmp_path: Path,
    drafter: DFlashDrafter,
    cache_dir: Path,
    extra: dict[str, object],
    changes: dict[str, object],
    message: str,
) -> None:
    one = saved(tmp_path / "one", drafter)
    other = saved(tmp_path / "other", kit.random_drafter(**changes), **extra)
    with pytest.raises(ConfigError, match=message):
        evaluate(one, other, cache_dir)
    if not changes:
        with pytest.raises(ConfigError, match=message):
            evaluate(other, one, cache_dir)


def test_the_same_target_in_another_dtype_is_the_same_target(
    tmp_path: Path, drafter: DFlashDrafter, cache_dir: Path
) -> None:
    one = saved(tmp_path / "one", drafter)
    half = saved(tmp_path / "half", drafter, target_fingerprint="f" * 32, target_dtype="bfloat16")
    assert evaluate(one, half, cache_dir)["against"]["difference"] == 0


def paired_rows(source: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """Tokens and verifications of two drafters with one true tau: rows differ far more than the two drafters do."""
    tokens = source.integers(40, 200, count)
    rate = source.uniform(0.25, 0.9, count)
    ours, theirs = (np.maximum(1, source.binomial(tokens, rate)) for _ in range(2))
    return np.stack([tokens, ours]), np.stack([tokens, theirs])


def test_the_paired_interval_covers_zero_in_about_95_percent_of_simulations_under_the_null() -> None:
    source = np.random.default_rng(0)
    covered = []
    for seed in range(400):
        ours, theirs = paired_rows(source, 60)
        low, high = paired_difference_interval(ours, theirs, seed=seed, num_resamples=400)
        covered.append(low <= 0 <= high)
    assert 0.91 <= np.mean(covered) <= 0.98


def test_pairing_cancels_what_the_rows_have_in_common() -> None:
    ours, theirs = paired_rows(np.random.default_rng(1), 200)
    low, high = paired_difference_interval(ours, theirs)
    alone = micro_tau_interval(*ours)
    assert high - low < (alone[1] - alone[0]) / 2


def test_a_real_difference_is_told_and_has_the_sign_of_the_better() -> None:
    ours, theirs = paired_rows(np.random.default_rng(2), 200)
    ours[1] = np.maximum(1, ours[1] * 3 // 4)  # a quarter fewer verifications
    low, _ = paired_difference_interval(ours, theirs)
    assert low > 0
    assert paired_difference_interval(theirs, ours)[1] < 0


def test_rows_that_do_not_pair_are_refused() -> None:
    two, three = np.ones((2, 2), dtype=np.int64), np.ones((2, 3), dtype=np.int64)
    for ours, theirs in ((two, three), (two[:, :0], two[:, :0]), (two, two * [[1], [0]])):
        with pytest.raises(ConfigError, match="bootstrap over"):
            paired_difference_interval(ours, theirs)


def test_trained_drafters_record_their_target_and_tokenizer(tiny_cache: Path, tmp_path: Path) -> None:
    from dflash_pipeline.train.loop import TrainOptions, run_train
    from dflash_pipeline.train.recipes import load_recipe

    sets = ["steps=1", "anchors_per_pack=8", "pack_tokens=300", "num_layers=1", "eval_rows=1", "heldout_share=0.2"]
    options = TrainOptions(cache=tiny_cache, out=tmp_path / "run", recipe=load_recipe("default", sets), device="cpu")
    run_train(options, lambda _: None)
    identity = open_cache(tiny_cache).manifest.identity
    record = json.loads((tmp_path / "run/drafter/config.json").read_text())["dflash_pipeline"]
    assert record["tokenizer_hash"] == identity.tokenizer_hash
    assert record["target_fingerprint"] == identity.target_fingerprint
    result = evaluate(tmp_path / "run", tmp_path / "run", tiny_cache)
    assert result["against"]["difference"] == 0
