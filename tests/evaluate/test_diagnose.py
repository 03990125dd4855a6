"""Every diagnosis finds the defect that it is there for."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from dflash_pipeline.drafter.checkpoint import save_drafter
from dflash_pipeline.drafter.masks import Tile, segment_tiles
from dflash_pipeline.drafter.model import DFlashDrafter, rotary
from dflash_pipeline.evaluate.diagnose import Diagnosis, fc_columns, self_checks
from dflash_pipeline.evaluate.measure import FrozenHead, measure_pack
from dflash_pipeline.evaluate.offline import EvaluateConfig, run_evaluate
from dflash_pipeline.evaluate.render import render_evaluation
from dflash_pipeline.store import Row, TargetHead, open_cache


def diagnosed(model: DFlashDrafter, head: TargetHead, rows: list[Row]) -> Diagnosis:
    frozen = FrozenHead.of(head, model.fc.weight)
    diagnosis = Diagnosis(model, frozen)
    diagnosis.add(rows, measure_pack(model, frozen, rows))
    return diagnosis


def test_an_evaluation_carries_the_diagnosis_and_people_can_read_it(
    tmp_path: Path, drafter: DFlashDrafter, cache_dir: Path
) -> None:
    save_drafter(tmp_path / "drafter", drafter)
    config = EvaluateConfig(drafter=tmp_path / "drafter", cache=cache_dir, device="cpu")
    plain = run_evaluate(config, lambda _: None)
    result = run_evaluate(replace(config, diagnose=True), lambda _: None)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert {key: result[key] for key in plain if key != "seconds"} == {k: v for k, v in plain.items() if k != "seconds"}
    assert "context_zeroed_tau" not in plain
    assert 1 <= result["context_zeroed_tau"] < 1.5 < result["tau"]["micro"]  # random weights without their context
    found = result["diagnosis"]
    assert sum(found["accepted_histogram"]) == result["verifications"]
    assert found["checks"]["ok"] is True
    assert found["checks"]["reads_context"] is True
    assert found["divergence_share"] == 0.0
    stream = io.StringIO()
    render_evaluation(result, Console(file=stream, width=160))
    for part in ("with the context zeroed", "self-checks passed", "context layer", "7 -> "):
        assert part in stream.getvalue()


def test_the_zeroed_context_is_the_same_walk_over_states_of_zeros(
    kit: SimpleNamespace, drafter: DFlashDrafter, head: TargetHead, rows: list[Row]
) -> None:
    found = diagnosed(drafter, head, rows[:6]).zeroed
    for row, walk in zip(rows, found, strict=False):
        zeros = {layer: torch.zeros_like(states) for layer, states in row.states.items()}
        for anchor, accepted in zip(walk.anchors, walk.accepted, strict=True):
            drafts = kit.slow_draft(drafter, head, zeros, anchor, int(row.tokens[anchor]))
            tokens = row.tokens.tolist()
            assert drafts[:accepted] == tokens[anchor + 1 : anchor + 1 + accepted]
            wrong = anchor + accepted + 1
            over = accepted == 7 or wrong == len(tokens) or not row.loss_mask[wrong]
            assert over or drafts[accepted] != tokens[wrong]


def test_the_histogram_counts_every_verification_by_its_accepted_drafts(
    drafter: DFlashDrafter, head: TargetHead, rows: list[Row]
) -> None:
    walks = measure_pack(drafter, FrozenHead.of(head, drafter.fc.weight), rows).walks
    expected = Counter(count for walk in walks for count in walk.accepted)
    assert diagnosed(drafter, head, rows).accepted == [expected[count] for count in range(8)]


def test_rejections_are_laid_on_the_row_where_the_row_left_the_targets_path(
    kit: SimpleNamespace, drafter: DFlashDrafter, head: TargetHead
) -> None:
    row = kit.row_with_runs(drafter, head, [1, 2], [[3, 1, 7, 2], [1, 0]], seed=4)
    first = 2
    rejected = [first + 4, first + 6, first + 4 + 2 + 8 + 3]  # the tokens after 3, 1 and 2 accepted drafts; not after 7
    top_ids = row.top_ids.clone()
    for position in (rejected[0], rejected[2], first + 1):  # the last one is an accepted draft
        top_ids[position - 1, 0] = (int(row.tokens[position]) + 1) % 90
    diagnosis = diagnosed(drafter, head, [Row(**{**vars(row), "top_ids": top_ids})])
    assert (diagnosis.rejected, diagnosis.rejected_diverged) == (5, 2)


def test_a_layer_that_fc_ignores_is_found_whatever_the_scale_of_its_states(
    kit: SimpleNamespace, tmp_path: Path, head: TargetHead, rows: list[Row]
) -> None:
    scaled = [Row(**{**vars(row), "states": {**row.states, 1: row.states[1] * 1e-3}}) for row in rows[:4]]
    cache = open_cache(kit.make_cache(tmp_path / "cache", scaled, head))
    model = kit.random_drafter()
    with torch.no_grad():
        model.fc.weight[:, :32] = 0.1
        model.fc.weight[:, 32:] = 0.2
    first, second = fc_columns(model, cache)  # columns in the order of context_layer_ids: 4, then 1
    assert (first["layer_id"], second["layer_id"]) == (4, 1)
    assert (first["rms"], second["rms"]) == pytest.approx((0.1, 0.2))
    assert second["output_share"] < 1e-5
    assert first["output_share"] > 0.999


def checks_of(model: DFlashDrafter, head: TargetHead, row: Row) -> dict[str, Any]:
    return self_checks(model, FrozenHead.of(head, model.fc.weight), row)


def test_a_mask_that_shows_the_anchors_own_state_is_found(
    drafter: DFlashDrafter, head: TargetHead, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checks_of(drafter, head, rows[0])["ok"]

    def leaky(layout: Any, block_size: int, *rest: Any) -> list[Tile]:
        tiles = segment_tiles(layout, block_size, *rest)
        return [replace(t, key_first=t.key_first + 1, key_last=t.key_last + 1) for t in tiles]

    monkeypatch.setattr("dflash_pipeline.drafter.attention.segment_tiles", leaky)
    found = checks_of(drafter, head, rows[0])
    assert found["mask_future_error"] > 0
    assert found["mask_plain_error"] > 1e-2
    assert not found["ok"]


@pytest.mark.parametrize("wrong", [lambda positions: positions + 1, lambda positions: positions // 2])
def test_positions_or_frequencies_that_are_off_are_found(
    drafter: DFlashDrafter,
    head: TargetHead,
    rows: list[Row],
    wrong: Callable[[torch.Tensor], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def turned(positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Any:
        return rotary(torch.where(positions > 0, wrong(positions), positions), head_dim, theta, dtype)

    monkeypatch.setattr("dflash_pipeline.drafter.model.rotary", turned)
    found = checks_of(drafter, head, rows[0])
    assert found["rope_error"] > 1e-2
    assert not found["ok"]


def test_a_drafter_that_does_not_read_its_context_is_told(
    kit: SimpleNamespace, head: TargetHead, rows: list[Row]
) -> None:
    model = kit.random_drafter()
    with torch.no_grad():
        model.fc.weight.zero_()
    assert checks_of(model, head, rows[0])["reads_context"] is False
