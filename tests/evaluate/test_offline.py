"""The whole offline evaluation: splits, sums, labels of honesty, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dflash_pipeline.drafter.checkpoint import save_drafter
from dflash_pipeline.drafter.model import DFlashDrafter
from dflash_pipeline.drafter.walk import RowWalk, acceptance_rates, macro_tau, micro_tau
from dflash_pipeline.errors import CheckpointError, ConfigError
from dflash_pipeline.evaluate.measure import FrozenHead, measure_pack
from dflash_pipeline.evaluate.offline import EvaluateConfig, run_evaluate
from dflash_pipeline.store import Row, TargetHead, open_cache
from dflash_pipeline.store.splits import heldout_rows

CONTRACT = {
    "rows",
    "verifications",
    "tokens",
    "tau",
    "per_slot_accuracy",
    "acceptance_rate",
    "on_policy_share",
    "baselines",
}


@pytest.fixture
def drafter_dir(tmp_path: Path, drafter: DFlashDrafter, cache_dir: Path) -> Path:
    """The drafter as a run on the cache would leave it, 40% of the rows held out."""
    cache = open_cache(cache_dir)
    record = {"cache_identity": cache.identity, "cache_fingerprint": cache.fingerprint, "heldout_share": 0.4}
    save_drafter(tmp_path / "drafter", drafter, extra=record)
    return tmp_path / "drafter"


def evaluate(drafter: Path, cache: Path, **options: object) -> dict[str, object]:
    result = run_evaluate(EvaluateConfig(drafter=drafter, cache=cache, device="cpu", **options), lambda _: None)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    return result


def expected_walks(model: DFlashDrafter, head: TargetHead, rows: list[Row]) -> list[RowWalk]:
    return [measure_pack(model, FrozenHead.of(head, model.fc.weight), [row]).walks[0] for row in rows]


def test_all_rows_of_a_foreign_cache_are_walked(
    kit: SimpleNamespace, tmp_path: Path, drafter: DFlashDrafter, head: TargetHead, rows: list[Row], drafter_dir: Path
) -> None:
    other = kit.make_cache(tmp_path / "other", rows, corpus="b")
    result = evaluate(drafter_dir, other)
    walks = expected_walks(drafter, head, rows)
    assert set(result) >= CONTRACT
    assert (result["split"], result["rows"], result["block_size"]) == ("all", 20, 8)
    assert result["tokens"] == sum(walk.tokens for walk in walks)
    assert result["verifications"] == sum(walk.verifications for walk in walks)
    assert result["tau"]["micro"] == micro_tau(walks) == result["tokens"] / result["verifications"]
    assert result["tau"]["macro"] == macro_tau(walks)
    assert result["tau"]["ci95"][0] < result["tau"]["micro"] < result["tau"]["ci95"][1]
    assert result["acceptance_rate"] == acceptance_rates(walks, 8)
    assert len(result["per_slot_accuracy"]) == 7
    assert result["cache_fingerprint"] == open_cache(other).fingerprint != result["drafter_cache_fingerprint"]
    assert (result["on_policy_share"], result["estimate"]) == (1.0, False)
    assert list(result["baselines"]) == ["ngram_1", "ngram_2", "ngram_3", "ngram_4", "prompt_lookup"]


def test_held_out_rows_of_its_own_cache_are_the_default(
    drafter: DFlashDrafter, head: TargetHead, rows: list[Row], drafter_dir: Path, cache_dir: Path
) -> None:
    held = heldout_rows(open_cache(cache_dir).prompt_hash, 0.4)
    assert 2 < held.sum() < 18
    result = evaluate(drafter_dir, cache_dir)
    assert (result["split"], result["rows"]) == ("heldout", held.sum())
    walks = expected_walks(drafter, head, [row for row, mine in zip(rows, held, strict=True) if mine])
    assert result["tau"]["micro"] == micro_tau(walks)
    assert result["baselines_note"] == f"fitted on {(~held).sum()} rows"
    train = evaluate(drafter_dir, cache_dir, split="train")
    everything = evaluate(drafter_dir, cache_dir, split="all")
    assert train["rows"] == (~held).sum()
    assert everything["verifications"] == train["verifications"] + result["verifications"]


def test_small_packs_give_the_same_figures(drafter_dir: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = evaluate(drafter_dir, cache_dir, split="all")
    monkeypatch.setattr("dflash_pipeline.evaluate.walks.PACK_TOKENS", 1)
    other = evaluate(drafter_dir, cache_dir, split="all")
    assert one | {"seconds": 0} == other | {"seconds": 0}


def test_baselines_may_come_from_the_training_cache(
    kit: SimpleNamespace, tmp_path: Path, rows: list[Row], drafter_dir: Path, cache_dir: Path
) -> None:
    held = heldout_rows(open_cache(cache_dir).prompt_hash, 0.4)
    other = kit.make_cache(tmp_path / "other", [row for row, mine in zip(rows, held, strict=True) if mine], corpus="b")
    result = evaluate(drafter_dir, other, baseline_cache=cache_dir)
    assert result["baselines_note"] == f"fitted on {(~held).sum()} rows"
    assert result["baselines"] == evaluate(drafter_dir, cache_dir)["baselines"]


def test_rows_of_another_author_make_tau_an_estimate(
    kit: SimpleNamespace, tmp_path: Path, drafter: DFlashDrafter, head: TargetHead, drafter_dir: Path
) -> None:
    rows = [kit.row_with_runs(drafter, head, [1, 2], [[7] * 12], seed=1, off_policy=range(10, 14))]
    result = evaluate(drafter_dir, kit.make_cache(tmp_path / "other", rows, corpus="b"))
    assert result["on_policy_share"] == pytest.approx(1 - 4 / 97)
    assert result["estimate"] is True
    assert result["tau"] == {"micro": 8.0, "macro": 8.0, "ci95": [8.0, 8.0]}
    assert list(result["baselines"]) == ["prompt_lookup"]  # there is nothing to fit an n-gram on


def test_short_replies_leave_late_slots_without_an_accuracy(
    kit: SimpleNamespace, tmp_path: Path, drafter: DFlashDrafter, head: TargetHead, drafter_dir: Path
) -> None:
    rows = [kit.row_with_runs(drafter, head, [n, 2], [[1, 0]], seed=n, row_id=str(n)) for n in (1, 2)]
    result = evaluate(drafter_dir, kit.make_cache(tmp_path / "other", rows, corpus="b"))
    assert result["per_slot_accuracy"][3:] == [None] * 4
    assert None not in result["per_slot_accuracy"][:3]


def test_rows_without_an_anchor_are_left_out(
    kit: SimpleNamespace, tmp_path: Path, drafter: DFlashDrafter, head: TargetHead, drafter_dir: Path
) -> None:
    short = kit.row_with_runs(drafter, head, [1, 2], [[]], seed=1, row_id="short")
    whole = kit.row_with_runs(drafter, head, [3, 4], [[2, 1]], seed=2, row_id="whole")
    assert evaluate(drafter_dir, kit.make_cache(tmp_path / "both", [short, whole], corpus="b"))["rows"] == 1
    with pytest.raises(ConfigError, match="no row to evaluate in split all; extract rows"):
        evaluate(drafter_dir, kit.make_cache(tmp_path / "none", [short], corpus="c"))


def test_a_run_folder_means_its_drafter_and_then_its_newest_checkpoint(
    tmp_path: Path, kit: SimpleNamespace, drafter: DFlashDrafter, cache_dir: Path
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.json").write_text('{"recipe": {}}', encoding="utf-8")
    with pytest.raises(CheckpointError, match="holds no drafter"):
        evaluate(run, cache_dir)
    for step in (2, 10):
        save_drafter(run / "checkpoints" / f"step-{step:07d}", drafter)
    assert evaluate(run, cache_dir)["drafter"] == str(run / "checkpoints" / "step-0000010")
    save_drafter(run / "drafter", drafter)
    assert evaluate(run, cache_dir)["drafter"] == str(run / "drafter")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_layer_ids": (1, 5)}, r"the drafter reads layers \[1, 5\], the cache holds \[1, 4, 6\].*1,4,5,6"),
        ({"vocab_size": 91}, "vocabulary 90, the drafter's is 91"),
        ({"hidden_size": 48}, "hidden size 32, the drafter's is 48"),
        ({"num_target_layers": 9}, "number of target layers 8, the drafter's is 9"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    kit: SimpleNamespace, tmp_path: Path, cache_dir: Path, changes: dict[str, object], message: str
) -> None:
    save_drafter(tmp_path / "other", kit.random_drafter(**changes))
    with pytest.raises(ConfigError, match=message):
        evaluate(tmp_path / "other", cache_dir)


def test_splits_that_cannot_be_known_or_are_empty_are_refused(
    tmp_path: Path, drafter: DFlashDrafter, cache_dir: Path
) -> None:
    save_drafter(tmp_path / "foreign", drafter)
    with pytest.raises(ConfigError, match="does not say which share of rows was held out; use --split all"):
        evaluate(tmp_path / "foreign", cache_dir, split="heldout")
    assert evaluate(tmp_path / "foreign", cache_dir)["drafter_cache_fingerprint"] is None
    save_drafter(
        tmp_path / "none", drafter, extra={"cache_identity": open_cache(cache_dir).identity, "heldout_share": 0}
    )
    with pytest.raises(ConfigError, match=r"no row to evaluate in split heldout \(held-out share 0\)"):
        evaluate(tmp_path / "none", cache_dir)
    save_drafter(tmp_path / "odd", drafter, extra={"heldout_share": "much"})
    with pytest.raises(CheckpointError, match="heldout_share must be a number"):
        evaluate(tmp_path / "odd", cache_dir)


def test_unknown_splits_and_devices_are_refused(drafter_dir: Path, cache_dir: Path) -> None:
    with pytest.raises(ConfigError, match="expected one of heldout, train, all"):
        EvaluateConfig(drafter=drafter_dir, cache=cache_dir, split="dev")
    with pytest.raises(ConfigError, match="device abacus"):
        run_evaluate(EvaluateConfig(drafter=drafter_dir, cache=cache_dir, device="abacus"), lambda _: None)


def test_progress_names_rows_rate_and_time_left(
    drafter_dir: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_pipeline.evaluate.walks.REPORT_SECONDS", 0)
    lines: list[str] = []
    run_evaluate(EvaluateConfig(drafter=drafter_dir, cache=cache_dir, split="all", device="cpu"), lines.append)
    assert any("3/20 rows" in line and "rows/s" in line and "left" in line for line in lines)


def test_random_drafts_score_near_one(kit: SimpleNamespace, tmp_path: Path, rows: list[Row]) -> None:
    source = np.random.default_rng(0)
    shuffled = []
    for row in rows:
        tokens = row.tokens.clone()
        tokens[:] = tokens.new_tensor(source.integers(0, 89, len(tokens)))
        shuffled.append(Row(**{**vars(row), "tokens": tokens}))
    save_drafter(tmp_path / "random", kit.random_drafter())
    result = evaluate(tmp_path / "random", kit.make_cache(tmp_path / "shuffled", shuffled, corpus="b"))
    assert 1 <= result["tau"]["micro"] < 1.1
    assert result["estimate"] is True
