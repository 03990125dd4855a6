from __future__ import annotations

from pathlib import Path

import pytest

from dflash_pipeline.store import describe, verify
from dflash_pipeline.store.diff import diff_caches
from dflash_pipeline.store.render import render_description, render_difference, render_verification, size


def test_sizes_have_a_unit() -> None:
    assert [size(value) for value in (0, 999, 1500, 2.5e9, 7e18)] == [
        "0 bytes", "999 bytes", "1.50 KB", "2.50 GB", "7,000.00 PB"
    ]  # fmt: skip


def test_a_description_shows_what_a_person_wants_to_know(pristine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = describe(pristine)
    render_description(info)
    shown = capsys.readouterr().out
    for expected in (
        *("8 in 4 shards", "rows.jsonl", "2 reply too short", "bits per value", f"{info['ratio']:.3f} of"),
        *("1, 4; hidden size 8", info["identity"], info["fingerprint"], f"{info['layers']['4']['rms']:.4g}"),
    ):
        assert expected in shown
    assert "repaired from" not in shown


def test_a_verification_names_the_bad_and_what_to_do(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    render_verification(verify(cache))
    assert "files" in capsys.readouterr().out
    path = cache / "shards/00002/tokens/c/0"
    path.unlink()
    render_verification(verify(cache))
    shown = capsys.readouterr().out
    assert str(path) in shown
    assert "bad shards: 2; other bad files: none" in shown
    assert "dflash cache repair" in shown


def test_a_difference_is_a_row_per_layer(pristine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    render_difference(diff_caches(pristine, pristine))
    shown = capsys.readouterr().out
    assert shown.count("100.000%") == 3
    assert shown.count("1.000000") == 4
