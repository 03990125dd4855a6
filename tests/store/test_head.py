from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from dflash_pipeline.errors import CacheCorrupt, CacheMissing, ConfigError
from dflash_pipeline.store import TargetHead
from dflash_pipeline.store.head import read_head, write_head


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_round_trips(synthetic: ModuleType, tmp_path: Path, tied: bool) -> None:
    head = synthetic.make_head(tied=tied)
    (tmp_path / "target").mkdir()
    write_head(tmp_path / "target", head)
    found = read_head(tmp_path, 8, 50)
    assert torch.equal(found.embed_tokens, head.embed_tokens)
    assert torch.equal(found.norm, head.norm)
    assert (found.lm_head is None) == tied
    assert torch.equal(found.head_weight, head.head_weight)
    assert found.norm_eps == 1e-6


def test_writing_a_head_twice_gives_the_same_bytes(synthetic: ModuleType, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_head(tmp_path / name, synthetic.make_head(tied=False))
    assert (tmp_path / "a/head.safetensors").read_bytes() == (tmp_path / "b/head.safetensors").read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"embed_tokens": torch.zeros(5)},
        {"norm": torch.zeros(5)},
        {"lm_head": torch.zeros(50, 9)},
        {"norm_eps": 0.0},
        {"norm_eps": float("nan")},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_tensors_that_do_not_fit_are_refused(changes: dict[str, object]) -> None:
    tensors: dict[str, object] = {
        "embed_tokens": torch.zeros(50, 8),
        "lm_head": None,
        "norm": torch.ones(8),
        "norm_eps": 1e-6,
    }
    with pytest.raises(ConfigError):
        TargetHead(**{**tensors, **changes})  # type: ignore[arg-type]


def test_a_damaged_head_is_refused(cache: Path) -> None:
    path = cache / "target" / "head.safetensors"
    data = path.read_bytes()
    for damaged in (b"", data[:20], data[:-1], b"\xff" * 64):
        path.write_bytes(damaged)
        with pytest.raises(CacheCorrupt, match=r"head\.safetensors"):
            read_head(cache, 8, 50)
    path.write_bytes(data)
    for hidden, vocab in ((9, 50), (8, 51)):
        with pytest.raises(CacheCorrupt, match="the plan says"):
            read_head(cache, hidden, vocab)
    path.unlink()
    with pytest.raises(CacheMissing, match="missing"):
        read_head(cache, 8, 50)
