"""Small drafters and random packs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dflash_pipeline.drafter.config import FULL, SLIDING, DrafterConfig
from dflash_pipeline.drafter.layout import PackLayout
from dflash_pipeline.drafter.model import DFlashDrafter, init_weights

KINDS = {"F": FULL, "S": SLIDING}


def make_config(kinds: str = "FF", **changes: Any) -> DrafterConfig:
    """Return T's sizes (hidden 64, 4 heads of 32, 2 KV heads, 1,024 rows); `kinds` names the layers, F or S."""
    values: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": len(kinds),
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "vocab_size": 1024,
        "block_size": 8,
        "mask_token_id": 3,
        "context_layer_ids": (1, 4),
        "num_target_layers": 8,
        "layer_types": tuple(KINDS[kind] for kind in kinds),
        "sliding_window": 5 if "S" in kinds else None,
        "rope_theta": 10000.0,
    }
    return DrafterConfig(**{**values, **changes})


def make_drafter(config: DrafterConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> DFlashDrafter:
    """Return a drafter with weights large enough, and norms uneven enough, that every part of it matters."""
    generator = torch.Generator().manual_seed(seed)
    model = DFlashDrafter(config)
    init_weights(model, generator, std=0.15)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.4, 1.8, generator=generator)
    return model.to(dtype)


def make_layout(seed: int, max_rows: int = 4, max_length: int = 25) -> PackLayout:
    """Return a random pack: rows of 1 to `max_length` tokens, none to many anchors each."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = int(torch.randint(1, max_rows + 1, (), generator=generator))
    lengths = torch.randint(1, max_length + 1, (num_rows,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    share = torch.rand(num_rows, generator=generator)
    anchors = [
        index
        for row in range(num_rows)
        for index in range(int(offsets[row]), int(offsets[row + 1]))
        if torch.rand((), generator=generator) < share[row]
    ]
    return PackLayout(offsets, torch.tensor(anchors, dtype=torch.int64))


@pytest.fixture(scope="session")
def config_of() -> Callable[..., DrafterConfig]:
    """`make_config`."""
    return make_config


@pytest.fixture(scope="session")
def drafter_of() -> Callable[..., DFlashDrafter]:
    """`make_drafter`."""
    return make_drafter


@pytest.fixture(scope="session")
def layout_of() -> Callable[..., PackLayout]:
    """`make_layout`."""
    return make_layout
