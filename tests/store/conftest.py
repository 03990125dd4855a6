"""Synthetic caches for the tests of the store."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def _no_fsync() -> Iterator[None]:
    """These tests write thousands of files; flushing them takes minutes and cannot be observed without a power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    """The module synthetic.py beside this file."""
    name = "dflash_tests_store_synthetic"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / "synthetic.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def pristine(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of eight rows in several shards, layers 1 and 4, bfloat16. Not to be changed."""
    path: Path = tmp_path_factory.mktemp("pristine") / "cache"
    synthetic.write_cache(path)
    return path


@pytest.fixture
def cache(pristine: Path, tmp_path: Path) -> Path:
    """A copy of the pristine cache that a test may damage."""
    return Path(shutil.copytree(pristine, tmp_path / "cache"))


@pytest.fixture(scope="session")
def reseal() -> Callable[[Path, Callable[[dict[str, Any]], object]], None]:
    """Change a sealed JSON file and give it a right digest again, as a hostile writer would."""
    from dflash_pipeline.store.jsonfile import seal

    def change(path: Path, mutate: Callable[[dict[str, Any]], object]) -> None:
        fields = json.loads(path.read_bytes())
        mutate(fields)
        fields.pop("digest", None)
        path.write_bytes(seal(fields))

    return change
