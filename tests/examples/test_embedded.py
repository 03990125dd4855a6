"""The embedded target and the corpus it wrote are what their page says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_pipeline.examples import embedded_corpus, embedded_target
from dflash_pipeline.examples.texts import prompt_text
from dflash_pipeline.examples.write_corpus import CorpusRecipe, LoopRule, greedy_replies, keep_rows

MAX_BYTES = 4_000_000
TARGET_FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in embedded_corpus().read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded_target())


@pytest.fixture(scope="module")
def model() -> Any:
    """The model in the dtype that its config names."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(embedded_target(), dtype="auto").eval()


def test_target_and_corpus_together_stay_under_four_megabytes() -> None:
    files = [path for path in embedded_target().parent.rglob("*") if path.is_file()]
    assert {path.name for path in embedded_target().iterdir()} == TARGET_FILES
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES


def test_target_is_a_plain_qwen3_stored_in_bfloat16_and_loaded_in_float32(model: Any) -> None:
    config = json.loads((embedded_target() / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == "float32"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for parameter in model.parameters():
        assert torch.equal(parameter, parameter.to(torch.bfloat16).float())
    assert torch.isfinite(torch.cat([parameter.flatten() for parameter in model.parameters()])).all()


def test_default_layer_ids_of_the_target_are_five_different_layers(model: Any) -> None:
    num_layers = model.config.num_hidden_layers
    ids = [round(1 + step * (num_layers - 4) / 4) for step in range(5)]
    assert len(set(ids)) == 5
    assert max(ids) < num_layers - 1


def test_tokenizer_fits_the_head_and_has_unused_tokens_for_a_mask(tokenizer: Any, model: Any, rows: Any) -> None:
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    reserved = tokenizer.convert_tokens_to_ids([f"<|reserved_{index}|>" for index in range(5)])
    used = {token for row in rows for key in ("prompt_ids", "completion_ids") for token in row[key]}
    assert not used & {*reserved, tokenizer.pad_token_id}


def test_chat_template_renders_the_prompts_and_marks_the_replies(tokenizer: Any, rows: list[dict[str, Any]]) -> None:
    row = next(row for row in rows if row["finish_reason"] == "stop")
    opening, reply = tokenizer.decode(row["prompt_ids"]), tokenizer.decode(row["completion_ids"][:-1])
    user = opening.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n<|im_start|>assistant\n")
    assert opening == prompt_text(user)
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
    assert tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True) == opening
    whole = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    marked = [token for token, mask in zip(whole["input_ids"], whole["assistant_masks"], strict=True) if mask]
    assert marked == row["completion_ids"]
    assert whole["input_ids"][: len(row["prompt_ids"])] == row["prompt_ids"]


def test_corpus_rows_are_complete_and_in_range(rows: list[dict[str, Any]], tokenizer: Any, model: Any) -> None:
    recipe = CorpusRecipe()
    assert len(rows) >= 1000
    assert sum(len(row["completion_ids"]) for row in rows) >= 40_000
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        ids = row["prompt_ids"] + row["completion_ids"]
        assert all(isinstance(token, int) and 0 <= token < model.config.vocab_size for token in ids)
        assert row["prompt_ids"] == tokenizer(tokenizer.decode(row["prompt_ids"]))["input_ids"]
        assert recipe.min_reply_tokens <= len(row["completion_ids"]) <= recipe.max_new_tokens
        ended = row["completion_ids"][-1] == tokenizer.eos_token_id
        assert row["finish_reason"] == ("stop" if ended else "length")
        assert tokenizer.eos_token_id not in row["completion_ids"][:-1]


def test_corpus_has_no_duplicate_and_no_looping_row(rows: list[dict[str, Any]]) -> None:
    for key in ("prompt_ids", "completion_ids"):
        assert len({str(row[key]) for row in rows}) == len(rows)
    kept, reasons = keep_rows(rows, CorpusRecipe(), LoopRule())
    assert kept == list(range(len(rows))), reasons


def test_replies_are_the_targets_own_greedy_output(rows: list[dict[str, Any]], model: Any) -> None:
    agreed = total = 0
    for row in rows[::60]:
        num_prompt = len(row["prompt_ids"])
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        with torch.inference_mode():
            predicted = model(input_ids=ids).logits[0, num_prompt - 1 : -1].argmax(-1)
        agreed += int((predicted == ids[0, num_prompt:]).sum())
        total += len(row["completion_ids"])
    assert agreed / total >= 0.99


def test_batched_generation_equals_one_row_at_a_time(rows: list[dict[str, Any]], model: Any, tokenizer: Any) -> None:
    prompts = [row["prompt_ids"] for row in rows[:4]]
    assert len({len(prompt) for prompt in prompts}) > 1

    def replies(batch: list[list[int]]) -> list[list[int]]:
        return greedy_replies(model, batch, max_new_tokens=40, stop_id=tokenizer.eos_token_id)

    assert replies(prompts) == [replies([prompt])[0] for prompt in prompts]


def test_loop_rule_finds_loops_and_passes_ordinary_text() -> None:
    rule = LoopRule()
    assert rule.loops([1, 2, 3, 4] * 8)
    assert rule.loops([7] * 20)
    assert not rule.loops(range(100))
    assert not rule.loops([1, 2])


def test_each_filter_drops_its_own_kind_of_row() -> None:
    def row(prompt: list[int], reply: list[int]) -> dict[str, Any]:
        return {"prompt_ids": prompt, "completion_ids": reply}

    first = list(range(100, 150))
    rows = [
        row([1], first),
        row([2], [5] * 50),
        row([3], first),
        row([1], list(range(200, 250))),
        row([4], [*first[:48], 9, 8, 7]),
        row([5], [1, 2, 3]),
        row([6], list(range(300, 350))),
    ]
    kept, reasons = keep_rows(rows, CorpusRecipe(), LoopRule())
    assert kept == [0, 6]
    reasons.pop("kept")
    assert reasons == dict.fromkeys(["loop", "duplicate reply", "duplicate prompt", "near duplicate", "too short"], 1)


def test_embedded_paths_are_inside_the_package() -> None:
    assert isinstance(embedded_target(), Path)
    assert embedded_corpus().parent == embedded_target().parent
