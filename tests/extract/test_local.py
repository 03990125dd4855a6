"""A local target writes what plain greedy decoding writes, whatever the batch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_pipeline.extract.config import ExtractConfig
from dflash_pipeline.extract.generate import GenerateConfig, run_generate
from dflash_pipeline.extract.local import LocalTarget
from dflash_pipeline.extract.run import run_extract
from dflash_pipeline.store import open_cache
from dflash_pipeline.target import TargetConfig, load_target
from dflash_pipeline.target.prompts import Prompt


def plain_greedy(target: Any, ids: list[int], count: int) -> list[int]:
    """One token after another, the whole text read again each time."""
    text = list(ids)
    for _ in range(count):
        with torch.inference_mode():
            text.append(int(target.model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(ids) :]


def prompts_of(lengths: list[int]) -> list[Prompt]:
    source = torch.Generator().manual_seed(1)
    return [
        Prompt(id=str(n), source="s", ids=torch.randint(3, 1000, (length,), generator=source).tolist(), raw={})
        for n, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("which", ["flat", "hybrid"])
def test_batches_write_what_one_prompt_at_a_time_writes(
    which: str, tiny_target_dir: Path, tiny_hybrid_dir: Path
) -> None:
    directory = tiny_target_dir if which == "flat" else tiny_hybrid_dir
    target = load_target(TargetConfig(name=str(directory), dtype="float32", device="cpu"))
    prompts = prompts_of([5, 9, 5, 13, 9, 5])
    expected = {prompt.id: plain_greedy(target, prompt.ids, 10) for prompt in prompts}
    local = LocalTarget(target, max_tokens=10, batch_rows=3)
    sizes = [[len(prompt.ids) for prompt in batch] for batch in local.batches(prompts)]
    assert sizes == ([[5, 5, 5], [9, 9, 13]] if which == "flat" else [[5, 5, 5], [9, 9], [13]])
    found = {prompt.id: reply for prompt, reply in local.answers(prompts)}
    for name, ids in expected.items():
        ends = [place for place, token in enumerate(ids) if token in local.end_ids]
        assert found[name].completion_ids == (ids[: ends[0] + 1] if ends else ids)


def test_settings_of_the_checkpoint_do_not_bend_the_most_likely_token(tiny_target_dir: Path, tmp_path: Path) -> None:
    bent = tmp_path / "bent"
    shutil.copytree(tiny_target_dir, bent)
    settings = {"do_sample": True, "temperature": 5.0, "repetition_penalty": 9.0, "eos_token_id": 2, "max_length": 7}
    (bent / "generation_config.json").write_text(json.dumps(settings))
    target = load_target(TargetConfig(name=str(bent), device="cpu"))
    (prompt,) = prompts_of([6])
    ((_, reply),) = LocalTarget(target, max_tokens=12, batch_rows=1).answers([prompt])
    assert reply.completion_ids[:11] == plain_greedy(target, prompt.ids, 11)  # type: ignore[union-attr]


def test_a_reply_ends_at_the_targets_own_end_token(tiny_target_dir: Path, tmp_path: Path) -> None:
    target = load_target(TargetConfig(name=str(tiny_target_dir), device="cpu"))
    first, second = prompts_of([6, 8])
    written = plain_greedy(target, first.ids, 8)
    target.model.generation_config.eos_token_id = [written[4], 1023]
    place = written.index(written[4])
    local = LocalTarget(target, max_tokens=8, batch_rows=2)
    replies = {prompt.id: reply for prompt, reply in local.answers([first, second])}
    reply = replies[first.id]
    assert reply.completion_ids == written[: place + 1]  # type: ignore[union-attr]
    assert reply.finish_reason == "stop"  # type: ignore[union-attr]


def test_what_a_local_target_writes_is_on_policy_for_extraction(tiny_target_dir: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    long = {"id": "long", "prompt_ids": list(range(4090))}
    lines = [{"id": str(n), "prompt": f"argument number {n} of the parser"} for n in range(5)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in [*lines, long]))
    out = tmp_path / "rows.jsonl"
    config = GenerateConfig(prompts=prompts, out=out, target=str(tiny_target_dir), max_tokens=14, device="cpu")
    with pytest.raises(Exception, match="outside the target's vocabulary"):
        run_generate(config, lambda _: None)
    long["prompt_ids"] = [5] * 4090
    prompts.write_text("".join(json.dumps(row) + "\n" for row in [*lines, long]))
    result = run_generate(config, lambda _: None)
    assert (result["rows"], result["refused"]) == (5, {"prompt and --max-tokens exceed the target's 4096 tokens": 1})
    cache = tmp_path / "cache"
    run_extract(ExtractConfig(corpus=(out,), target=str(tiny_target_dir), out=cache, device="cpu"))
    reader = open_cache(cache)
    assert reader.num_rows == 5
    for index in range(5):
        row = reader.read_row(index)
        equal = row.tokens[1:] == row.top_ids[:-1, 0]
        assert bool(equal[row.loss_mask[1:]].all())
