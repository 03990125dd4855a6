"""Time one training step of a drafter (forward and backward) on random input, in a process of its own.

    python benchmarks/ours.py --tokens 1024 --anchors 64 --block 16 [--dtype bfloat16] [--breakdown]

Prints one JSON line: seconds of a step (median of the runs), peak memory of the process in bytes, the useful FLOPs of
a step and the machine's matmul peak, measured in the same process. Full-vocabulary hard cross entropy on given labels,
all B-1 drafted slots of every anchor supervised. Embeddings and head are one tensor, as in the target of these sizes
(SmolLM2). Useful FLOPs: 2 per multiply-add of fc and K/V of the context tokens, projections and MLP of the block
tokens, attention over each query's visible keys and the head on the supervised slots; times 3 for what is trained
(forward, gradient of input, gradient of weights), times 2 for the frozen head.
`step.py` compares this with a peer, `scale.py` varies the sizes.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_pipeline.drafter.attention import segment_attention
from dflash_pipeline.drafter.config import DrafterConfig
from dflash_pipeline.drafter.layout import PackLayout
from dflash_pipeline.drafter.model import DFlashDrafter, init_weights
from dflash_pipeline.train.forward import TrainingForward
from dflash_pipeline.train.loss import weighted_loss
from dflash_pipeline.train.optimizer import step_in_channel_units
from dflash_pipeline.train.step import StepInput

CONTEXT_LAYERS = (1, 8, 14, 20, 27)


class Step:
    """One drafter, one pack and the frozen head, all random; sizes as in `args`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.dtype = args, getattr(torch, args.dtype)
        config = DrafterConfig(
            hidden_size=args.hidden,
            intermediate_size=args.intermediate,
            num_layers=args.layers,
            num_heads=args.heads,
            num_kv_heads=args.kv_heads,
            head_dim=args.head_dim,
            vocab_size=args.vocab,
            max_position_embeddings=1 << 20,
            block_size=args.block,
            mask_token_id=16,
            context_layer_ids=CONTEXT_LAYERS,
            num_target_layers=30,
            layer_types=("full_attention",) * args.layers,
        )
        generator = torch.Generator().manual_seed(0)
        self.model = DFlashDrafter(config)
        init_weights(self.model, generator)
        self.forward = TrainingForward(self.model, precision=args.dtype)
        self.embed_VH = torch.randn(args.vocab, args.hidden, generator=generator).mul_(0.05)
        self.head_VH = self.embed_VH.to(self.dtype)
        self.states_TC = torch.randn(args.tokens, len(CONTEXT_LAYERS) * args.hidden, generator=generator)
        self.block_tokens_AB = torch.randint(0, args.vocab, (args.anchors, args.block), generator=generator)
        places = np.random.default_rng(0).choice(args.tokens - args.block + 1, args.anchors, replace=False)
        self.anchors = sorted(places.tolist())
        self.slots_N = torch.arange(args.anchors * args.block).view(args.anchors, -1)[:, 1:].flatten()
        self.labels_N = torch.randint(0, args.vocab, (len(self.slots_N),), generator=generator)
        self.weights_N = torch.exp(-(self.slots_N % args.block - 1).float() / 4)

    def layout(self) -> PackLayout:
        """Return the pack's layout, its masks not yet made: every step has another pack."""
        return PackLayout.single_row(self.args.tokens, self.anchors)

    def autocast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def loss(self, hidden: Tensor) -> Tensor:
        total, _ = weighted_loss(hidden, self.head_VH, self.labels_N, self.weights_N)
        return total / self.weights_N.sum()

    def run(self) -> float:
        """Forward and backward; return the loss."""
        given = StepInput(
            layout=self.layout(),
            states_TC=self.states_TC,
            block_tokens_AB=self.block_tokens_AB,
            slots_N=self.slots_N,
            labels_N=self.labels_N,
            weights_N=self.weights_N,
            teacher_NH=None,
        )
        total, _ = self.forward(given, self.embed_VH, self.head_VH)
        loss = total / self.weights_N.sum()
        loss.backward()
        return loss.item()

    def useful_flops(self) -> dict[str, float]:
        """Return the useful FLOPs of one step by part."""
        a = self.args
        heads, kv_heads, block_tokens = a.heads * a.head_dim, a.kv_heads * a.head_dim, a.anchors * a.block
        keys = sum(self.anchors) * a.block + block_tokens * a.block
        projections = block_tokens * 2 * a.hidden * (heads + kv_heads)
        return {
            "context": 6.0 * a.tokens * a.hidden * (len(CONTEXT_LAYERS) * a.hidden + 2 * kv_heads * a.layers),
            "attention": 6.0 * a.layers * (projections + 2 * keys * heads),
            "mlp": 6.0 * a.layers * block_tokens * 3 * a.hidden * a.intermediate,
            "head and loss": 4.0 * len(self.slots_N) * a.hidden * a.vocab,
        }

    def parts(self) -> dict[str, Callable[[], None]]:
        """Return each part of the step alone, forward and backward."""
        model, size = self.model, self.args.hidden
        layout = self.layout()
        features = torch.randn(self.args.tokens, size)
        with torch.no_grad(), self.autocast():
            key_values = model.context_key_values(features, layout.positions)
        hidden = torch.randn(len(self.slots_N), size, requires_grad=True)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def context() -> None:
            with self.autocast():
                out = model.context_key_values(model.context_features(self.states_TC), layout.positions)
            torch.autograd.backward([t for pair in out for t in pair], [torch.ones_like(t) for p in out for t in p])

        def layers(mlp: bool) -> None:
            x = self.embed_VH[self.block_tokens_AB.flatten()].requires_grad_()
            cos_sin = model._rotary(layout.slot_positions(self.args.block), x)
            with self.autocast():
                for layer, key_value in zip(model._attention_layers(), key_values, strict=True):
                    if mlp:
                        x = x + layer.mlp(layer.post_attention_layernorm(x))
                    else:
                        pair = (key_value[0].requires_grad_(), key_value[1].requires_grad_())
                        x = x + layer.self_attn(layer.input_layernorm(x), pair, cos_sin, layout, segment_attention)
            x.sum().backward()  # type: ignore[no-untyped-call]

        return {
            "context": context,
            "attention": lambda: layers(mlp=False),
            "mlp": lambda: layers(mlp=True),
            "head and loss": lambda: self.loss(hidden).backward(),  # type: ignore[no-untyped-call]
            "optimiser": lambda: _optimise(optimizer, model, self.states_TC.shape[1]),
        }


def matmul_peak(dtype: torch.dtype, size: int = 2048, runs: int = 8) -> float:
    """Return the best FLOP/s of a square matrix product, laid out as a linear layer's.

    Without bfloat16 units the other layout is sixty times slower in bfloat16.
    """
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    best = min(timed(lambda: torch.mm(a, b.T)) for _ in range(runs))
    return 2 * size**3 / best


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one process."""
    step = Step(args)
    losses = []

    def once() -> None:
        losses.append(step.run())

    seconds = []
    for _ in range(args.runs + 1):
        seconds.append(timed(once))
        step.model.zero_grad()
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    flops = step.useful_flops()
    result = {
        "step_seconds": statistics.median(seconds[1:]),
        "peak_bytes": peak_bytes,
        "loss": losses[0],
        "useful_flops": sum(flops.values()),
        "matmul_flops_per_second": matmul_peak(step.dtype),
    }
    if args.breakdown:
        result["breakdown"] = {}
        for name, call in step.parts().items():
            spent = statistics.median([timed(call) for _ in range(args.runs + 1)][1:])
            share = flops.get(name, 0.0) / spent / result["matmul_flops_per_second"]
            result["breakdown"][name] = {"seconds": spent, "peak_share": share}
    return result


def sizes_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the sizes that ours and the peer share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"hidden": 576, "intermediate": 1536, "heads": 9, "kv-heads": 3, "head-dim": 64, "layers": 5}
    sizes |= {"vocab": 49152, "tokens": 1024, "anchors": 64, "block": 16, "runs": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser


def _optimise(optimizer: torch.optim.Optimizer, model: DFlashDrafter, channels: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    step_in_channel_units(optimizer, model, torch.ones(channels), 1.0)


def main() -> None:
    parser = sizes_parser(__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="bfloat16: autocast")
    parser.add_argument("--breakdown", action="store_true", help="time each part of the step alone")
    args = parser.parse_args()
    print(json.dumps({**vars(args), **measure(args)}))


if __name__ == "__main__":
    main()
