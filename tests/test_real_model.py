"""On a real chat model: cached states and choices equal those of the live model, seen by independent hooks.

Runs where SmolLM2-135M-Instruct lies (examples/get_smollm2.py fetches it) and an on-policy corpus of it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dflash_pipeline.extract.config import ExtractConfig
from dflash_pipeline.extract.run import run_extract
from dflash_pipeline.store import CacheReader, open_cache
from dflash_pipeline.store.plan import Plan, read_plan

MODEL = Path(os.environ.get("DFLASH_SMOLLM2", Path.home() / ".cache/dflash-real/smollm2"))
CORPUS = Path(__file__).resolve().parents[2] / "shared/data/smollm2-dev.jsonl"
NUM_ROWS = 20

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not (MODEL / "model.safetensors").exists(), reason=f"no SmolLM2 in {MODEL}; set DFLASH_SMOLLM2"),
    pytest.mark.skipif(not CORPUS.exists(), reason=f"no corpus at {CORPUS}"),
]


@pytest.fixture(scope="module")
def cache_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("real") / "cache"
    run_extract(ExtractConfig(corpus=(CORPUS,), target=str(MODEL), out=out, limit_rows=NUM_ROWS, device="cpu"))
    return out


@pytest.fixture(scope="module")
def live():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval()


@torch.no_grad()
def forward(live, rows: list[list[int]], layer_ids: tuple[int, ...]):
    """One forward of the whole model, its head included, with plain hooks: states by layer, and logits."""
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    states: dict[int, torch.Tensor] = {}
    hooks = [
        live.model.layers[layer].register_forward_hook(
            lambda _module, _inputs, output, layer=layer: states.update(
                {layer: (output[0] if isinstance(output, tuple) else output).clone()}
            )
        )
        for layer in layer_ids
    ]
    logits = live(input_ids=ids, attention_mask=mask, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return states, logits


def rows_of(cache: CacheReader, plan: Plan, batch: list[int]) -> list[list[int]]:
    assert cache.row_ids == plan.row_ids  # nothing was dropped
    return [cache.read_row(row).tokens.tolist() for row in batch]


def test_in_the_planned_batch_shape_states_and_choices_are_those_of_the_live_model_bit_for_bit(
    cache_path: Path, live
) -> None:
    cache, plan = open_cache(cache_path), read_plan(cache_path)
    assert cache.num_rows == NUM_ROWS
    assert cache.layer_ids == (1, 8, 14, 20, 27)
    for shard in range(cache.num_shards):
        for batch in plan.batches(shard):
            states, logits = forward(live, rows_of(cache, plan, batch), cache.layer_ids)
            for place, number in enumerate(batch):
                row = cache.read_row(number)
                length = len(row.tokens)
                for layer in cache.layer_ids:
                    assert torch.equal(row.states[layer], states[layer][place, :length])
                own = logits[place, :length]
                lowest = (own == own.max(-1, keepdim=True).values).int().argmax(-1)
                assert torch.equal(row.top_ids[:, 0].long(), lowest)


def test_in_another_shape_states_point_the_same_way_and_choices_differ_only_at_near_ties(
    cache_path: Path, live
) -> None:
    cache = open_cache(cache_path)
    for number in range(cache.num_rows):
        row = cache.read_row(number)
        states, logits = forward(live, [row.tokens.tolist()], cache.layer_ids)
        for layer in cache.layer_ids:
            cosine = torch.nn.functional.cosine_similarity(row.states[layer], states[layer][0], dim=-1)
            assert float(cosine.min()) > 0.999
        own = logits[0]
        other = own.argmax(-1) != row.top_ids[:, 0]
        gap = own.max(-1).values - own.gather(-1, row.top_ids[:, :1].long())[:, 0]
        step = own.max(-1).values.abs() * 2.0**-7  # one bfloat16 step
        assert bool((gap[other] <= step[other]).all())
