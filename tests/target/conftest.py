"""Fixtures of the target room: loaded tiny targets."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_pipeline.target import Target, TargetConfig, load_target


@pytest.fixture(scope="session")
def tiny_target(tiny_target_dir: Path) -> Target:
    """T, loaded."""
    return load_target(TargetConfig(name=str(tiny_target_dir), device="cpu"))


@pytest.fixture(scope="session")
def tiny_hybrid(tiny_hybrid_dir: Path) -> Target:
    """The tiny wrapper, loaded."""
    return load_target(TargetConfig(name=str(tiny_hybrid_dir), device="cpu"))
