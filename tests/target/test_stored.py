"""The fingerprint from the files is that of the loaded target, or there is none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_pipeline.target import TargetConfig, attention_in_effect, describe_target, load_target, stored_weights


def both(directory: Path, **changes: Any) -> tuple[tuple[str, str] | None, tuple[str, str]]:
    """What the files say, and what the loaded target says."""
    config = TargetConfig(**{"name": str(directory), "device": "cpu", **changes})
    target = load_target(config)
    loaded = (target.fingerprint, attention_in_effect(target.config, config.attention))
    return stored_weights(config, describe_target(config)), loaded


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"attention": "eager"}])
def test_the_files_of_a_plain_checkpoint_say_what_the_loaded_target_says(
    tiny_target_dir: Path, changes: dict[str, Any]
) -> None:
    found, loaded = both(tiny_target_dir, **changes)
    assert found == loaded


def test_other_weights_have_another_fingerprint(tiny_target_dir: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(tiny_target_dir, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"][5, 5] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    found, loaded = both(other)
    assert found == loaded != both(tiny_target_dir)[0]


def test_tied_heads_and_several_files_are_read_too(tiny_target_dir: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    split = Path(shutil.copytree(tiny_target_dir, tmp_path / "split"))
    (split / "model.safetensors").unlink()
    model.save_pretrained(split, max_shard_size="300KB")
    assert len(list(split.glob("model-*.safetensors"))) > 2
    found, loaded = both(split)
    assert found == loaded == both(tiny_target_dir)[0]
    tied = Path(shutil.copytree(tiny_target_dir, tmp_path / "tied"))
    content = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps({**content, "tie_word_embeddings": True}))
    tensors = load_file(tied / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tied / "model.safetensors", metadata={"format": "pt"})
    found, loaded = both(tied)
    assert found == loaded


def test_where_only_loading_tells_the_files_say_nothing(
    tiny_target_dir: Path, tiny_hybrid_dir: Path, tmp_path: Path
) -> None:
    assert both(tiny_hybrid_dir)[0] is None  # its tensors have other names than the language model's
    config = TargetConfig(name=str(tiny_target_dir), device="cpu")
    description = describe_target(config)
    broken = Path(shutil.copytree(tiny_target_dir, tmp_path / "broken"))
    there = TargetConfig(name=str(broken), device="cpu")
    tensors = load_file(broken / "model.safetensors")
    lacking = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    save_file(lacking, broken / "model.safetensors", metadata={"format": "pt"})
    assert stored_weights(there, description) is None
    save_file({**lacking, "model.norm.weight": tensors["model.norm.weight"][:9].clone()}, broken / "model.safetensors")
    assert stored_weights(there, description) is None
    (broken / "model.safetensors").write_bytes(b"no tensors")
    assert stored_weights(there, description) is None
    (broken / "model.safetensors").unlink()
    assert stored_weights(there, description) is None
