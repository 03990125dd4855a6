"""Held-out figures during training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_pipeline.drafter.checkpoint import load_drafter
from dflash_pipeline.drafter.model import DFlashDrafter
from dflash_pipeline.store import open_cache
from dflash_pipeline.train.facts import resolve_for
from dflash_pipeline.train.heldout import ROWS_AT_ONCE, HeldOut
from dflash_pipeline.train.loop import TrainOptions, run_train
from dflash_pipeline.train.recipes import load_recipe


def test_the_context_of_the_held_out_rows_is_computed_once(
    tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The walk and the accuracy of the slots read the same keys and values; the figures are those of the run."""
    recipe = load_recipe("default", ["num_layers=2", "heldout_share=0.4", "pack_tokens=400", "steps=2"])
    options = TrainOptions(cache=tiny_cache, out=tmp_path / "run", recipe=recipe, num_workers=0, device="cpu")
    result = run_train(options, lambda _line: None)
    assert result is not None
    cache = open_cache(tiny_cache)
    model = load_drafter(tmp_path / "run").model
    heldout = HeldOut(cache, resolve_for(recipe, cache, None, model.fc.weight.device), cache.head())
    computed: list[int] = []
    real = DFlashDrafter.context_features

    def context_features(self: DFlashDrafter, states: Any) -> Any:
        computed.append(len(states))
        return real(self, states)

    monkeypatch.setattr(DFlashDrafter, "context_features", context_features)
    figures = heldout.measure(model)
    assert heldout.num_rows > ROWS_AT_ONCE
    assert len(computed) == -(-heldout.num_rows // ROWS_AT_ONCE)
    last = result["heldout"][-1]
    assert {key: last[key] for key in figures} == figures
