"""Train the embedded target: a small Qwen3-style chat model that completes Python functions.

    python -m dflash_pipeline.examples.train_target OUT

Everything is made from the running installation's standard library (see `texts`): the byte-level BPE
tokenizer, the chat template and the weights. The same seed, thread count and installation give the same model.

Legend of axes: R rows, T tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from .texts import CHAT_TEMPLATE, END, SPECIAL_TOKENS, TURN_END, Function, prompt_text, standard_library_functions


@dataclass(frozen=True, kw_only=True)
class TargetRecipe:
    """What the embedded target is made of; the defaults made the files in this repository."""

    seed: int = 0
    vocab_size: int = 1024
    hidden_size: int = 128
    intermediate_size: int = 320
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10000.0
    max_position_embeddings: int = 1024
    num_steps: int = 800
    batch_tokens: int = 3072
    max_length: int = 320
    matrix_learning_rate: float = 0.02
    """Muon's, for the matrices of the layers."""
    learning_rate: float = 4e-3
    """AdamW's, for the embedding and the norms."""
    warmup_share: float = 0.04
    weight_decay: float = 0.1
    prompt_weight: float = 0.5
    """Weight of a prompt token in the loss; a reply token weighs 1."""


def train_tokenizer(texts: list[str], vocab_size: int) -> Any:
    """Return a byte-level BPE tokenizer (PreTrainedTokenizerFast) of exactly `vocab_size` tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe, eos_token=TURN_END, pad_token=END, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(recipe: TargetRecipe, tokenizer: Any) -> Any:
    """Return a freshly initialised Qwen3ForCausalLM in float32."""
    torch.manual_seed(recipe.seed)
    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_position_embeddings,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.02,
    )
    model: Any = Qwen3ForCausalLM(config)
    return model.float()


class Muon:
    """Momentum, orthogonalised per matrix by five Newton-Schulz steps (Jordan et al. 2024), in float32.

    Ours because torch.optim.Muon orthogonalises in bfloat16, which took 4 s a step here on a CPU without units for
    it. Matrices of one shape are stacked.
    """

    def __init__(self, matrices: list[torch.nn.Parameter], *, lr: float, weight_decay: float) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": lr, "weight_decay": weight_decay}]
        shapes = sorted({matrix.shape for matrix in matrices})
        self.stacks = [[matrix for matrix in matrices if matrix.shape == shape] for shape in shapes]
        self.momenta = [torch.zeros(len(stack), *stack[0].shape) for stack in self.stacks]

    @torch.no_grad()
    def step(self) -> None:
        """Take one step along the orthogonalised Nesterov momentum, with decoupled weight decay."""
        lr, decay = self.param_groups[0]["lr"], self.param_groups[0]["weight_decay"]
        for stack, momentum in zip(self.stacks, self.momenta, strict=True):
            gradient = torch.stack([matrix.grad for matrix in stack if matrix.grad is not None])
            momentum.lerp_(gradient, 0.05)
            update = gradient.lerp(momentum, 0.95)
            rows, columns = update.shape[-2:]
            x = update.mT if rows > columns else update
            x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
            for _ in range(5):
                a = x @ x.mT
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
            x = x.mT if rows > columns else x
            for matrix, direction in zip(stack, x, strict=True):
                matrix.mul_(1 - lr * decay).sub_(direction, alpha=lr * max(1, rows / columns) ** 0.5)


class Documents:
    """The training documents as token ids, cut anew in each epoch."""

    def __init__(self, functions: list[Function], tokenizer: Any, recipe: TargetRecipe) -> None:
        self.functions = functions
        self.tokenizer = tokenizer
        self.recipe = recipe

    def epoch(self, epoch: int) -> list[list[tuple[list[int], int]]]:
        """Return the batches of one epoch: lists of (ids, number of prompt tokens), of like lengths."""
        source = random.Random(f"{self.recipe.seed}-{epoch}")
        pairs = [function.document(source) for function in self.functions]
        prompts = self.tokenizer([prompt_text(user) for user, _ in pairs])["input_ids"]
        replies = self.tokenizer([reply + TURN_END for _, reply in pairs])["input_ids"]
        rows = [
            (prompt + reply, len(prompt))
            for prompt, reply in zip(prompts, replies, strict=True)
            if len(prompt) + len(reply) <= self.recipe.max_length
        ]
        source.shuffle(rows)
        rows.sort(key=lambda row: len(row[0]) // 16)  # stable: rows of like length stay shuffled
        batches: list[list[tuple[list[int], int]]] = [[]]
        for row in rows:
            if (len(batches[-1]) + 1) * len(row[0]) > self.recipe.batch_tokens:
                batches.append([])
            batches[-1].append(row)
        source.shuffle(batches)
        return batches


def batch_loss(model: Any, batch: list[tuple[list[int], int]], prompt_weight: float) -> tuple[torch.Tensor, float]:
    """Return the weighted mean cross entropy of a batch, and the plain mean over its reply tokens."""
    longest = max(len(ids) for ids, _ in batch)
    ids_RT = torch.zeros(len(batch), longest, dtype=torch.int64)
    weight_RT = torch.zeros(len(batch), longest)
    for index, (ids, num_prompt) in enumerate(batch):
        ids_RT[index, : len(ids)] = torch.tensor(ids)
        weight_RT[index, :num_prompt] = prompt_weight
        weight_RT[index, num_prompt : len(ids)] = 1.0
    logits = model(input_ids=ids_RT[:, :-1], use_cache=False).logits  # causal: right padding cannot reach real tokens
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids_RT[:, 1:].flatten(), reduction="none")
    weights = weight_RT[:, 1:].flatten()
    replies = (weights == 1.0).float()
    return (losses * weights).sum() / weights.sum(), float((losses.detach() * replies).sum() / replies.sum())


def train(model: Any, documents: Documents, recipe: TargetRecipe) -> None:
    """Train in place: linear warmup, then linear decay to zero."""
    layers = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if all(parameter is not matrix for matrix in layers)]
    optimizers: list[Muon | torch.optim.AdamW] = [
        Muon(layers, lr=recipe.matrix_learning_rate, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(others, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    peaks = [recipe.matrix_learning_rate, recipe.learning_rate]
    warmup = max(1, round(recipe.warmup_share * recipe.num_steps))
    step, epoch, start, mean = 0, 0, time.monotonic(), 0.0
    while step < recipe.num_steps:
        for batch in documents.epoch(epoch):
            rate = min((step + 1) / warmup, (recipe.num_steps - step) / (recipe.num_steps - warmup))
            for optimizer, peak in zip(optimizers, peaks, strict=True):
                optimizer.param_groups[0]["lr"] = peak * rate
            loss, reply_loss = batch_loss(model, batch, recipe.prompt_weight)
            model.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            mean += max(0.02, 1 / (step + 1)) * (reply_loss - mean)
            step += 1
            if step % 50 == 0:
                print(
                    f"step {step} epoch {epoch} reply loss {mean:.3f} seconds {time.monotonic() - start:.0f}",
                    file=sys.stderr,
                    flush=True,
                )
            if step == recipe.num_steps:
                break
        epoch += 1


@torch.no_grad()
def held_out_loss(model: Any, documents: Documents) -> float:
    """Return the mean cross entropy per reply token of documents, each cut once."""
    total = count = 0.0
    for batch in documents.epoch(0):
        tokens = float(sum(len(ids) - num_prompt for ids, num_prompt in batch))
        total += batch_loss(model, batch, 0.0)[1] * tokens
        count += tokens
    return total / count


def save_target(model: Any, tokenizer: Any, out: Path) -> None:
    """Write an ordinary Hugging Face folder: weights stored as bfloat16, computed in float32.

    The config names float32, so a loader upcasts the stored values: bfloat16 arithmetic is slow on CPUs
    without units for it, and the file would be twice as large in float32.
    """
    model.to(torch.bfloat16)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _edit_json(out / "config.json", dtype="float32")
    _edit_json(out / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")  # known to every version
    for path in out.iterdir():
        path.chmod(0o644)


def _edit_json(path: Path, **changes: str) -> None:
    values = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    """Train the tokenizer and the model, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=TargetRecipe.num_steps)
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists; name a new folder")
    torch.set_num_threads(arguments.threads)
    recipe = TargetRecipe(num_steps=arguments.steps)
    functions = standard_library_functions()
    training = [function for function in functions if not function.held_out]
    tokenizer = train_tokenizer(["\n".join(function.lines) for function in training], recipe.vocab_size)
    model = build_model(recipe, tokenizer)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(training)} of {len(functions)} functions, {size} parameters", file=sys.stderr)
    train(model, Documents(training, tokenizer, recipe), recipe)
    loss = held_out_loss(model, Documents([f for f in functions if f.held_out], tokenizer, recipe))
    print(f"held-out reply loss {loss:.3f} nats per token", file=sys.stderr)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    save_target(model, tokenizer, arguments.out)
    print(arguments.out)


if __name__ == "__main__":
    main()
