"""Fixtures of the target room: loaded tiny targets."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from dflash_pipeline.target import Target, TargetConfig, load_target


def helper(name: str) -> ModuleType:
    """Load a module that lies beside the tests."""
    path = Path(__file__).resolve().parents[1] / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"dflash_test_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_hybrid_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> Path:
    """The folder of a tiny Qwen3.5-like multimodal wrapper."""
    directory: Path = helper("hybrid").save_tiny_hybrid(tmp_path_factory.mktemp("hybrid"), tiny_tokenizer_dir)
    return directory


@pytest.fixture(scope="session")
def tiny_target(tiny_target_dir: Path) -> Target:
    """T, loaded."""
    return load_target(TargetConfig(name=str(tiny_target_dir), device="cpu"))


@pytest.fixture(scope="session")
def tiny_hybrid(tiny_hybrid_dir: Path) -> Target:
    """The tiny wrapper, loaded."""
    return load_target(TargetConfig(name=str(tiny_hybrid_dir), device="cpu"))
