"""Completions of a target on this machine, greedily and in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..target import Target, end_tokens
from ..target.prompts import Prompt
from .reply import Refused, Reply

PADDABLE = {"full_attention", "sliding_attention"}


class LocalTarget:
    """Writes replies with transformers' own generation, stripped of all that changes the most likely token."""

    def __init__(self, target: Target, max_tokens: int, batch_rows: int) -> None:
        from transformers import GenerationConfig  # noqa: PLC0415 - seconds

        self.target, self.max_tokens, self.batch_rows = target, max_tokens, batch_rows
        self.end_ids = end_tokens(target)
        target.model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, eos_token_id=sorted(self.end_ids), pad_token_id=0, bos_token_id=None
        )

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, Reply | Refused]]:
        """Yield each prompt with its reply, or why there is none, batch by batch, shortest prompts first."""
        limit = self.target.description.max_length
        fitting = []
        for prompt in prompts:
            if limit is not None and len(prompt.ids) + self.max_tokens > limit:
                yield prompt, Refused(f"prompt and --max-tokens exceed the target's {limit} tokens")
            else:
                fitting.append(prompt)
        for batch in self.batches(fitting):
            yield from zip(batch, self._generate(batch), strict=True)

    def batches(self, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
        """Cut prompts into batches of like length; where padding would change the states, of equal length."""
        kinds = set(getattr(self.target.config, "layer_types", None) or ["full_attention"])
        paddable = kinds <= PADDABLE and not getattr(self.target.model, "_is_stateful", False)
        batches: list[list[Prompt]] = []
        for prompt in sorted(prompts, key=lambda prompt: len(prompt.ids)):
            last = batches[-1] if batches else None
            equal = last is not None and len(last[-1].ids) == len(prompt.ids)
            if last is not None and len(last) < self.batch_rows and (equal or paddable):
                last.append(prompt)
            else:
                batches.append([prompt])
        return batches

    def _generate(self, batch: Sequence[Prompt]) -> list[Reply | Refused]:
        width = max(len(prompt.ids) for prompt in batch)
        ids, mask = (torch.zeros(len(batch), width, dtype=torch.int64) for _ in range(2))
        for row, prompt in enumerate(batch):
            ids[row, width - len(prompt.ids) :] = torch.tensor(prompt.ids)
            mask[row, width - len(prompt.ids) :] = 1
        device = self.target.device
        with torch.inference_mode():
            found = self.target.model.generate(
                input_ids=ids.to(device), attention_mask=mask.to(device), max_new_tokens=self.max_tokens
            )
        written = found[:, width:].tolist()
        return [self._reply(prompt, completion) for prompt, completion in zip(batch, written, strict=True)]

    def _reply(self, prompt: Prompt, completion: list[int]) -> Reply | Refused:
        ends = [place for place, token in enumerate(completion) if token in self.end_ids]
        ids = completion[: ends[0] + 1] if ends else completion
        text = self.target.tokenizer.decode(ids, skip_special_tokens=True)
        if not text.strip():
            return Refused("empty reply")
        return Reply(text=text, finish_reason="stop" if ends else "length", prompt_ids=prompt.ids, completion_ids=ids)
