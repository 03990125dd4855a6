"""Fixtures of the extract room."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dflash_pipeline.extract import ExtractConfig


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


@pytest.fixture
def tokenizer(tiny_tokenizer_dir: Path) -> Any:
    """The tokenizer of T, fresh, so that a test may give it another template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_tokenizer_dir)


@pytest.fixture
def settings(tmp_path: Path, tiny_target_dir: Path, chat_corpus: Path) -> Callable[..., ExtractConfig]:
    """An extraction of T's chat corpus into several small shards; keywords change it."""

    def build(**changes: Any) -> ExtractConfig:
        values: dict[str, Any] = {
            "corpus": (chat_corpus,),
            "target": str(tiny_target_dir),
            "out": tmp_path / "cache",
            "device": "cpu",
            "batch_tokens": 500,
            "shard_tokens": 1500,
        }
        return ExtractConfig(**{**values, **changes})

    return build
