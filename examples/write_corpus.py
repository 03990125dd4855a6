"""Let the embedded target write its own corpus: greedy replies, duplicates and loops left out.

    python -m dflash_pipeline.examples.write_corpus TARGET OUT.jsonl

Each row carries the token ids of prompt and reply, as extraction reads them; the tokenizer gives their text.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .texts import Function, prompt_text, standard_library_functions


@dataclass(frozen=True, kw_only=True)
class CorpusRecipe:
    """How the corpus is written; the defaults made the file in this repository."""

    seed: int = 1
    num_explain: int = 2600
    """Prompts that ask what the parameters of a function are; functions of two parameters or more."""
    num_complete: int = 1600
    """Prompts that ask for the rest of a function; other functions."""
    num_rows: int = 1400
    """Rows to keep at most: the file and the target together stay under 4 MB."""
    max_prompt_tokens: int = 128
    max_new_tokens: int = 128
    min_reply_tokens: int = 24
    max_shared: float = 0.75
    """Share of a reply's 8-grams that may stand in one earlier reply."""
    batch_rows: int = 64


@dataclass(frozen=True, kw_only=True)
class LoopRule:
    """When a reply counts as looping."""

    size: int = 4
    max_repeats: int = 4
    """An n-gram of `size` tokens may stand in a reply this many times."""
    min_distinct_share: float = 0.7
    """At least this share of a reply's n-grams is distinct."""

    def loops(self, ids: Sequence[int]) -> bool:
        """Return whether the reply repeats itself more than the rule allows."""
        grams = Counter(tuple(ids[at : at + self.size]) for at in range(len(ids) - self.size + 1))
        if not grams:
            return False
        return max(grams.values()) > self.max_repeats or len(grams) < self.min_distinct_share * grams.total()


@torch.inference_mode()
def greedy_replies(
    model: Any, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stop_id: int
) -> list[list[int]]:
    """Return the greedy reply of each prompt, `stop_id` included where the model wrote it.

    Shorter prompts are padded on the left and the padding is masked, so a reply is what the model says of its row
    alone, up to the last bits of the arithmetic. Equal logits go to the lowest id.
    """
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[stop_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    pads = torch.tensor([longest - len(prompt) for prompt in prompts])
    written = model.generate(
        input_ids=ids,
        attention_mask=(torch.arange(longest) >= pads[:, None]).long(),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=stop_id,
        pad_token_id=stop_id,
    )
    replies: list[list[int]] = written[:, longest:].tolist()
    return [reply[: reply.index(stop_id) + 1] if stop_id in reply else reply for reply in replies]


def draw_prompts(
    functions: Sequence[Function], tokenizer: Any, recipe: CorpusRecipe
) -> list[tuple[Function, str, list[int]]]:
    """Return (function, user's message, prompt ids) in a random order, one prompt of each drawn function."""
    source = random.Random(recipe.seed)
    left = {"explain": recipe.num_explain, "complete": recipe.num_complete}
    prompts = []
    for function in source.sample(list(functions), len(functions)):
        kind = "explain" if left["explain"] and function.explanation.count("\n") >= 2 else "complete"
        user = (function.explain() if kind == "explain" else function.complete(source))[0]
        ids = tokenizer(prompt_text(user))["input_ids"]
        if left[kind] and len(ids) <= recipe.max_prompt_tokens:
            prompts.append((function, user, ids))
            left[kind] -= 1
    source.shuffle(prompts)
    return prompts


def keep_rows(rows: Sequence[dict[str, Any]], recipe: CorpusRecipe, rule: LoopRule) -> tuple[list[int], Counter[str]]:
    """Return the indices of the rows to keep, in order, and how many fell to each reason.

    Reasons, tried in this order: `too short`, `loop`, `duplicate prompt`, `duplicate reply`, `near duplicate` (more
    than `max_shared` of the reply's different 8-grams stand in one kept reply), and
    `not needed` once there are enough rows.
    """
    kept: list[int] = []
    reasons: Counter[str] = Counter()
    prompts: set[tuple[int, ...]] = set()
    replies: set[tuple[int, ...]] = set()
    holders: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        if len(kept) == recipe.num_rows:
            reasons["not needed"] += 1
            continue
        prompt, reply = tuple(row["prompt_ids"]), tuple(row["completion_ids"])
        grams = {reply[at : at + 8] for at in range(len(reply) - 7)}
        shared = Counter(holder for gram in grams for holder in holders.get(gram, ()))
        reason = None
        if len(reply) < recipe.min_reply_tokens:
            reason = "too short"
        elif rule.loops(reply):
            reason = "loop"
        elif prompt in prompts:
            reason = "duplicate prompt"
        elif reply in replies:
            reason = "duplicate reply"
        elif shared and max(shared.values()) > recipe.max_shared * len(grams):
            reason = "near duplicate"
        if reason is not None:
            reasons[reason] += 1
            continue
        prompts.add(prompt)
        replies.add(reply)
        for gram in grams:
            holders.setdefault(gram, []).append(index)
        kept.append(index)
        reasons["kept"] += 1
    return kept, reasons


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write JSON lines beside `path` and rename."""
    beside = path.with_name(path.name + ".part")
    with beside.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def main() -> None:
    """Generate, filter and write the corpus."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the target's folder")
    parser.add_argument("out", type=Path, help="the .jsonl file to write")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    recipe, rule = CorpusRecipe(), LoopRule()
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    prompts = draw_prompts(standard_library_functions(), tokenizer, recipe)
    rows: list[dict[str, Any]] = [{} for _ in prompts]
    by_length = sorted(range(len(prompts)), key=lambda index: (len(prompts[index][2]), index))  # little padding
    for start in range(0, len(by_length), recipe.batch_rows):
        batch = by_length[start : start + recipe.batch_rows]
        replies = greedy_replies(
            model,
            [prompts[index][2] for index in batch],
            max_new_tokens=recipe.max_new_tokens,
            stop_id=tokenizer.eos_token_id,
        )
        for index, reply in zip(batch, replies, strict=True):
            function, _, ids = prompts[index]
            ended = reply[-1] == tokenizer.eos_token_id
            rows[index] = {
                "id": f"python-{index:05d}",
                "source": function.name,
                "prompt_ids": ids,
                "completion_ids": reply,
                "finish_reason": "stop" if ended else "length",
            }
    kept, reasons = keep_rows(rows, recipe, rule)
    write_rows(arguments.out, [rows[index] for index in kept])
    tokens = sum(len(rows[index]["completion_ids"]) for index in kept)
    print(json.dumps({"prompts": len(prompts), "completion_tokens": tokens, **reasons}), file=sys.stderr)
    print(arguments.out)


if __name__ == "__main__":
    main()
