"""Only the drafter is taken out of a checkpoint of others, whatever is wrapped around it, and no code of it runs."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_pipeline.drafter.checkpoint import load_drafter
from dflash_pipeline.drafter.model import DFlashDrafter
from dflash_pipeline.errors import CacheMismatch, CheckpointError, ConfigError
from dflash_pipeline.evaluate.export import ExportConfig, run_export


@pytest.fixture
def config_file(tmp_path: Path, drafter: DFlashDrafter) -> Path:
    path = tmp_path / "their-config.json"
    path.write_text(json.dumps(drafter.config.to_zlab()))
    return path


def renamed(model: DFlashDrafter, prefix: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return OrderedDict((prefix + name, value.to(dtype)) for name, value in model.state_dict().items())


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def export(path: Path, out: Path, config: Path | None = None, **options: Any) -> dict[str, Any]:
    return run_export(ExportConfig(run=path, out=out, config=config, **options))


def check_same(out: Path, drafter: DFlashDrafter, dtype: torch.dtype = torch.float32) -> None:
    weights = load_file(out / "model.safetensors")
    assert weights.keys() == drafter.state_dict().keys()
    for name, value in drafter.state_dict().items():
        assert torch.equal(weights[name], value.to(dtype))
    assert load_drafter(out).config == drafter.config


WRAPPED = {
    "bare": lambda sd: sd(""),
    "data parallel": lambda sd: {"model": sd("module.")},
    "compiled": lambda sd: {"state_dict": sd("_orig_mod."), "epoch": 3},
    "both, nested": lambda sd: {"a": {"model_state_dict": sd("module._orig_mod.draft_model.")}, "b": [1, "x"]},
    "a wrapper inside": lambda sd: {
        "model": {name.replace("self_attn", "_orig_mod.self_attn"): value for name, value in sd("net.").items()}
    },
    "with the frozen parts": lambda sd: {
        "model": sd("drafter.")
        | {"target.lm_head.weight": torch.ones(2), "drafter.embed_tokens.weight": torch.ones(3)},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(5)}}, "param_groups": [{"lr": 1e-3}]},
    },
}


@pytest.mark.parametrize("how", sorted(WRAPPED))
def test_the_drafter_is_found_under_keys_and_prefixes(
    how: str, tmp_path: Path, drafter: DFlashDrafter, config_file: Path
) -> None:
    path = saved(tmp_path / "their.pt", WRAPPED[how](lambda prefix: renamed(drafter, prefix)))
    result = export(path, tmp_path / "out", config_file)
    check_same(tmp_path / "out", drafter)
    assert result["tensors"] == 3 + 11 * 2
    assert result["ignored_tensors"] == (2 if how == "with the frozen parts" else 0)
    again = export(path, tmp_path / "out", config_file)
    assert again["unchanged"] is True


@pytest.mark.parametrize("name", ["layers.2.mlp.up_proj.weight", "layers.0.self_attn.q_proj.bias", "fc.bias"])
def test_no_part_of_the_drafter_is_left_out(
    tmp_path: Path, drafter: DFlashDrafter, config_file: Path, name: str
) -> None:
    weights = renamed(drafter, "net.") | {f"net.{name}": torch.ones(2)}
    path = saved(tmp_path / "their.pt", {"model": weights})
    with pytest.raises(CheckpointError, match=f"has a {name} that the configuration does not ask for"):
        export(path, tmp_path / "out", config_file)


def test_bfloat16_stays_bfloat16(tmp_path: Path, drafter: DFlashDrafter, config_file: Path) -> None:
    path = saved(tmp_path / "their.pt", {"model": renamed(drafter, "", torch.bfloat16)})
    assert export(path, tmp_path / "out", config_file)["dtype"] == "bfloat16"
    check_same(tmp_path / "out", drafter, torch.bfloat16)


def test_a_configuration_beside_or_inside_is_taken(tmp_path: Path, drafter: DFlashDrafter) -> None:
    inside = saved(tmp_path / "inside.pt", {"model": renamed(drafter, ""), "config": drafter.config.to_zlab()})
    export(inside, tmp_path / "one")
    check_same(tmp_path / "one", drafter)
    (tmp_path / "step").mkdir()
    beside = saved(tmp_path / "step" / "model.pt", renamed(drafter, ""))
    with pytest.raises(CheckpointError, match="carries no configuration of a drafter: give its config"):
        export(beside, tmp_path / "two")
    (tmp_path / "step" / "config.json").write_text(json.dumps(drafter.config.to_zlab()))
    export(beside, tmp_path / "two")
    check_same(tmp_path / "two", drafter)


def test_of_several_drafters_none_is_guessed(
    tmp_path: Path, drafter: DFlashDrafter, kit: SimpleNamespace, config_file: Path
) -> None:
    other = kit.random_drafter()
    with torch.no_grad():
        other.norm.weight.fill_(2)
    path = saved(tmp_path / "their.pt", {"model": renamed(drafter, "net."), "ema": renamed(other, "net.")})
    with pytest.raises(CheckpointError, match=r"holds 2 drafters; choose one with --weights: model/net\., ema/net\."):
        export(path, tmp_path / "out", config_file)
    export(path, tmp_path / "out", config_file, weights="ema/net.")
    check_same(tmp_path / "out", other)
    with pytest.raises(CheckpointError, match="holds no drafter at raw; choose one"):
        export(path, tmp_path / "raw", config_file, weights="raw")
    with pytest.raises(CacheMismatch, match=r"norm\.weight differ"):
        export(path, tmp_path / "out", config_file, weights="model/net.")


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/dflash-was-executed",)


def test_files_that_hold_code_or_no_drafter_are_refused_in_one_line(
    tmp_path: Path, drafter: DFlashDrafter, config_file: Path
) -> None:
    weights = renamed(drafter, "")
    lacking = {name: value for name, value in weights.items() if "layers.1.mlp" not in name}
    wide = {**weights, "layers.0.self_attn.q_norm.weight": torch.ones(17)}
    integers = {**weights, "norm.weight": torch.ones(32, dtype=torch.int8)}
    cases: list[tuple[Any, str]] = [
        ({"model": weights, "hook": Evil()}, "holds more than tensors"),
        ({"model": weights, "args": argparse.Namespace(lr=1)}, "holds more than tensors"),
        ({"model": {"weight": torch.ones(2)}}, "holds no DFlash drafter"),
        ([1, 2], "expected a dictionary, found a list"),
        (lacking, r"has no layers\.1\.mlp\.gate_proj\.weight \(3 of 25 are missing\)"),
        (wide, r"q_norm\.weight has shape \[17\], the configuration asks for \[16\]"),
        (integers, "norm.weight is torch.int8"),
        ({**weights, "norm.weight": torch.full((32,), float("nan"))}, "not finite"),
    ]
    for number, (content, message) in enumerate(cases):
        path = saved(tmp_path / f"{number}.pt", content)
        with pytest.raises(CheckpointError, match=message) as caught:
            export(path, tmp_path / "out", config_file)
        assert "\n" not in str(caught.value)
    assert not Path("/tmp/dflash-was-executed").exists()
    old = tmp_path / "old.pt"
    torch.save({"model": weights}, old, _use_new_zipfile_serialization=False)
    (tmp_path / "text.pt").write_text("not a checkpoint")
    for path in (old, tmp_path / "text.pt"):
        with pytest.raises(
            CheckpointError, match=r"not a file of torch\.save that can be mapped: no zip file"
        ) as caught:
            export(path, tmp_path / "out", config_file)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_options_of_a_file_are_refused_for_a_folder(tmp_path: Path, config_file: Path) -> None:
    with pytest.raises(ConfigError, match="--config and --weights are for a checkpoint file"):
        export(tmp_path, tmp_path / "out", config_file)


MEASURED = """
import resource, sys
from pathlib import Path
from dflash_pipeline.evaluate.export import ExportConfig, run_export
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run_export(ExportConfig(run=Path(sys.argv[1]), out=Path(sys.argv[2]), config=Path(sys.argv[3])))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_a_large_checkpoint_is_mapped_and_not_loaded(tmp_path: Path, drafter: DFlashDrafter, config_file: Path) -> None:
    moments = {number: {"exp_avg": torch.ones(20_000_000)} for number in range(4)}
    path = saved(tmp_path / "large.pt", {"optimizer": {"state": moments}, "model": renamed(drafter, "module.")})
    size = path.stat().st_size
    assert size > 320_000_000
    command = [sys.executable, "-c", MEASURED, str(path), str(tmp_path / "out"), str(config_file)]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown < size / 4
    check_same(tmp_path / "out", drafter)
