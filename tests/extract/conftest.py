"""Fixtures of the extract room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_pipeline.extract import ExtractConfig, run_extract


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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path, chat_corpus: Path) -> Path:
    """A complete cache of five shards. Not to be changed."""
    out = tmp_path_factory.mktemp("repair") / "cache"
    corpus, target = (chat_corpus,), str(tiny_target_dir)
    run_extract(ExtractConfig(corpus=corpus, target=target, out=out, device="cpu", batch_tokens=500, shard_tokens=400))
    return out
