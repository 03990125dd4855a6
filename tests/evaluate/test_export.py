"""An export is z-lab's two files with the drafter's own weights, or it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from dflash_pipeline.drafter.checkpoint import load_drafter, save_drafter
from dflash_pipeline.drafter.layout import PackLayout
from dflash_pipeline.drafter.model import DFlashDrafter
from dflash_pipeline.errors import CacheMismatch, CheckpointError
from dflash_pipeline.evaluate.export import ExportConfig, run_export

RECORD = {"cache_identity": "i", "cache_fingerprint": "f", "heldout_share": 0.05, "steps": 7}


@pytest.fixture
def run(tmp_path: Path, drafter: DFlashDrafter) -> Path:
    """A finished run: config, a checkpoint with an optimiser beside the weights, and the drafter."""
    run = tmp_path / "run"
    for folder in ("checkpoints/step-0000007", "drafter"):
        save_drafter(run / folder, drafter, extra=RECORD)
    (run / "config.json").write_text('{"recipe": {}}', encoding="utf-8")
    (run / "checkpoints/step-0000007/optimizer.safetensors").write_bytes(b"moments")
    return run


def outputs(model: DFlashDrafter) -> torch.Tensor:
    source = torch.Generator().manual_seed(1)
    states = torch.randn(20, 2 * 32, generator=source)
    embeds = torch.randn(3 * 8, 32, generator=source)
    with torch.no_grad():
        return model(embeds, model.context_features(states), PackLayout.single_row(20, [4, 9, 15]))


def facts_shapes() -> dict[str, list[int]]:
    """Names and shapes as published for this layout, of the tests' drafter: H 32, 4/2 heads of 16, I 64, K 2."""
    shapes = {"fc.weight": [32, 64], "hidden_norm.weight": [32], "norm.weight": [32]}
    for i in (0, 1):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": [32],
            f"layers.{i}.post_attention_layernorm.weight": [32],
            f"layers.{i}.self_attn.q_proj.weight": [64, 32],
            f"layers.{i}.self_attn.k_proj.weight": [32, 32],
            f"layers.{i}.self_attn.v_proj.weight": [32, 32],
            f"layers.{i}.self_attn.o_proj.weight": [32, 64],
            f"layers.{i}.self_attn.q_norm.weight": [16],
            f"layers.{i}.self_attn.k_norm.weight": [16],
            f"layers.{i}.mlp.gate_proj.weight": [64, 32],
            f"layers.{i}.mlp.up_proj.weight": [64, 32],
            f"layers.{i}.mlp.down_proj.weight": [32, 64],
        }
    return shapes


def test_an_export_holds_exactly_the_published_names_and_shapes(run: Path, tmp_path: Path) -> None:
    result = run_export(ExportConfig(run=run, out=tmp_path / "out"))
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: list(value.shape) for name, value in weights.items()} == facts_shapes()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    assert result["tensors"] == 3 + 11 * 2
    assert result["bytes"] == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert (result["out"], result["unchanged"], result["steps"]) == (str(tmp_path / "out"), False, 7)
    assert not list(tmp_path.glob(".out*"))


def test_an_export_computes_what_the_run_computed(run: Path, tmp_path: Path, drafter: DFlashDrafter) -> None:
    run_export(ExportConfig(run=run, out=tmp_path / "a"))
    run_export(ExportConfig(run=run / "checkpoints" / "step-0000007", out=tmp_path / "b"))
    run_export(ExportConfig(run=tmp_path / "a", out=tmp_path / "c"))
    for name in "abc":
        loaded = load_drafter(tmp_path / name)
        assert torch.equal(outputs(loaded.model), outputs(drafter))
        assert loaded.config == drafter.config
        assert loaded.extra == RECORD


def test_the_weights_take_the_dtype_of_the_target(run: Path, tmp_path: Path, drafter: DFlashDrafter) -> None:
    assert run_export(ExportConfig(run=run, out=tmp_path / "own"))["dtype"] == "float32"
    save_drafter(run / "drafter", drafter, extra={**RECORD, "target_dtype": "bfloat16"})
    assert run_export(ExportConfig(run=run, out=tmp_path / "half"))["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    weights = load_file(tmp_path / "half" / "model.safetensors")
    for name, value in drafter.state_dict().items():
        assert torch.equal(weights[name], value.bfloat16())
    assert run_export(ExportConfig(run=tmp_path / "half", out=tmp_path / "again"))["dtype"] == "bfloat16"
    save_drafter(run / "drafter", drafter, extra={**RECORD, "target_dtype": "int4"})
    with pytest.raises(CheckpointError, match="target_dtype must be float32 or bfloat16, found 'int4'"):
        run_export(ExportConfig(run=run, out=tmp_path / "odd"))


def test_an_unfinished_run_exports_its_newest_checkpoint(run: Path, tmp_path: Path, kit: SimpleNamespace) -> None:
    for path in (run / "drafter").iterdir():
        path.unlink()
    (run / "drafter").rmdir()
    save_drafter(run / "checkpoints" / "step-0000030", kit.random_drafter(), extra={**RECORD, "steps": 30})
    result = run_export(ExportConfig(run=run, out=tmp_path / "out"))
    assert (result["source"], result["steps"]) == (str(run / "checkpoints" / "step-0000030"), 30)


def test_exporting_again_changes_nothing(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = run_export(ExportConfig(run=run, out=out))
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    again = run_export(ExportConfig(run=run, out=out))
    assert again == {**first, "unchanged": True}
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_another_drafter_is_not_overwritten_and_the_difference_is_named(
    run: Path, tmp_path: Path, kit: SimpleNamespace
) -> None:
    out = tmp_path / "out"
    run_export(ExportConfig(run=run, out=out))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    other = kit.random_drafter()
    with torch.no_grad():
        other.norm.weight[3] += 1
    for model, message in ((other, "norm.weight differ"), (kit.random_drafter(block_size=4), "block_size 8, not 4")):
        save_drafter(tmp_path / "other", model, extra=RECORD)
        with pytest.raises(CacheMismatch, match=message):
            run_export(ExportConfig(run=tmp_path / "other", out=out))
    save_drafter(run / "drafter", kit.random_drafter(), extra={**RECORD, "heldout_share": 0.1})
    with pytest.raises(CacheMismatch, match=r"heldout_share 0\.05, not 0\.1"):
        run_export(ExportConfig(run=run, out=out))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_folder_with_anything_else_is_not_touched(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(CacheMismatch, match=r"holds notes.txt, not an export"):
        run_export(ExportConfig(run=run, out=out))
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    with pytest.raises(CacheMismatch, match="not an export"):
        run_export(ExportConfig(run=run, out=run))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CacheMismatch, match="not an export"):
        run_export(ExportConfig(run=run, out=tmp_path / "file"))


def test_an_empty_folder_and_leftovers_of_a_killed_export_do_not_block(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / ".out.writing").mkdir()
    (tmp_path / ".out.writing" / "model.safetensors").write_bytes(b"half")
    run_export(ExportConfig(run=run, out=tmp_path / "out"))
    assert load_drafter(tmp_path / "out").extra == RECORD


def test_a_folder_without_a_drafter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        run_export(ExportConfig(run=tmp_path / "nothing", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
