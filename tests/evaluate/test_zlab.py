"""A second implementation of z-lab's drafter, written from the description of its checkpoint alone, agrees with ours.

It reads config.json and model.safetensors by itself, one anchor and one query at a time in float64, and shares no code
with the package.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_pipeline.drafter.checkpoint import load_drafter, save_drafter
from dflash_pipeline.drafter.layout import PackLayout
from dflash_pipeline.drafter.model import DFlashDrafter
from dflash_pipeline.evaluate.export import ExportConfig, run_export

HIDDEN, VOCAB = 32, 90


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean() + eps).sqrt() * weight


def turned(head: Tensor, position: int, theta: float) -> Tensor:
    """Rotate channel i with channel i + half by position / theta^(i / half)."""
    half = len(head) // 2
    out = head.clone()
    for i in range(half):
        angle = position / theta ** (i / half)
        out[i] = head[i] * math.cos(angle) - head[i + half] * math.sin(angle)
        out[i + half] = head[i + half] * math.cos(angle) + head[i] * math.sin(angle)
    return out


def their_logits(
    directory: Path, states: dict[int, Tensor], anchor: int, token: int, embed: Tensor, head: Tensor
) -> Tensor:
    """Return the logits [B, V] of the block at `anchor`, from what lies in the folder and the states before it."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    w = {name: value.double() for name, value in load_file(directory / "model.safetensors").items()}
    inner, eps, theta = config["dflash_config"], config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]
    size, wide = inner["block_size"], config["head_dim"]
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    features = []
    for position in range(anchor):
        joined = torch.cat([states[layer][position].double() for layer in inner["target_layer_ids"]])
        features.append(rms(w["fc.weight"] @ joined, w["hidden_norm.weight"], eps))
    block = [embed[token].double()] + [embed[inner["mask_token_id"]].double()] * (size - 1)
    for number in range(config["num_hidden_layers"]):
        part = {k.removeprefix(f"layers.{number}."): v for k, v in w.items() if k.startswith(f"layers.{number}.")}
        normed = [rms(x, part["input_layernorm.weight"], eps) for x in block]
        keys, values = [], []
        for position, x in enumerate([*features, *normed]):
            k = (part["self_attn.k_proj.weight"] @ x).split(wide)
            keys.append([turned(rms(each, part["self_attn.k_norm.weight"], eps), position, theta) for each in k])
            values.append((part["self_attn.v_proj.weight"] @ x).split(wide))
        sliding = config["layer_types"][number] == "sliding_attention"
        after = []
        for slot, x in enumerate(normed):
            position = anchor + slot
            seen = range(anchor + size)
            if sliding:
                seen = range(max(0, position - config["sliding_window"] + 1), position + 1)
            heads = []
            for index, q in enumerate((part["self_attn.q_proj.weight"] @ x).split(wide)):
                query = turned(rms(q, part["self_attn.q_norm.weight"], eps), position, theta)
                scores = torch.stack([query @ keys[place][index // groups] for place in seen]) / math.sqrt(wide)
                weights = scores.softmax(0)
                heads.append(sum(weights[n] * values[place][index // groups] for n, place in enumerate(seen)))
            after.append(block[slot] + part["self_attn.o_proj.weight"] @ torch.cat(heads))
        block = []
        for x in after:
            y = rms(x, part["post_attention_layernorm.weight"], eps)
            gate, up = part["mlp.gate_proj.weight"] @ y, part["mlp.up_proj.weight"] @ y
            block.append(x + part["mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up))
    return torch.stack([head.double() @ rms(x, w["norm.weight"], eps) for x in block])


def our_logits(
    model: DFlashDrafter, states: dict[int, Tensor], anchors: list[int], tokens: list[int], embed: Tensor, head: Tensor
) -> Tensor:
    """The same for several anchors of a row at once, by the package: [A, B, V]."""
    model = model.double()
    config = model.config
    ids = torch.full((len(anchors), config.block_size), config.mask_token_id)
    ids[:, 0] = torch.tensor(tokens)
    joined = torch.cat([states[layer].double() for layer in config.context_layer_ids], dim=1)
    layout = PackLayout.single_row(len(joined), anchors)
    with torch.no_grad():
        hidden = model(embed.double()[ids.flatten()], model.context_features(joined), layout)
    return (hidden @ head.double().T).view(len(anchors), config.block_size, -1)


def inputs(seed: int) -> tuple[dict[int, Tensor], Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    states = {layer: torch.randn(20, HIDDEN, generator=source) * (1 + layer) for layer in (1, 4, 6)}
    return states, torch.randn(VOCAB, HIDDEN, generator=source), torch.randn(VOCAB, HIDDEN, generator=source)


def check_agreement(directory: Path, model: DFlashDrafter) -> None:
    states, embed, head = inputs(9)
    anchors, tokens = [0, 1, 9, 19], [5, 88, 0, 41]
    ours = our_logits(model, states, anchors, tokens, embed, head)
    for index, (anchor, token) in enumerate(zip(anchors, tokens, strict=True)):
        theirs = their_logits(directory, states, anchor, token, embed, head)
        assert theirs.std() > 1  # something is computed
        assert torch.allclose(ours[index], theirs, rtol=1e-5, atol=1e-5)  # our rotation's angles are float32


@pytest.mark.parametrize(
    "kinds",
    [("full_attention", "full_attention"), ("sliding_attention", "full_attention"), ("sliding_attention",) * 2],
)
def test_our_export_gives_the_same_logits_by_their_rules(
    kinds: tuple[str, ...], kit: SimpleNamespace, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"layer_types": kinds}
    if "sliding_attention" not in kinds:
        changes["sliding_window"] = None
    model = kit.random_drafter(**changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.4, 1.8, generator=torch.Generator().manual_seed(len(parameter)))
    save_drafter(tmp_path / "run", model, extra={"steps": 1})
    run_export(ExportConfig(run=tmp_path / "run", out=tmp_path / "out"))
    check_agreement(tmp_path / "out", load_drafter(tmp_path / "run").model)


def test_a_folder_built_by_hand_in_their_layout_loads_here(tmp_path: Path) -> None:
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_target_layers": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
        "use_sliding_window": True,
        "max_window_layers": 2,
        "dtype": "bfloat16",
        "rope_theta": 5000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "block_size": 5,
        "dflash_config": {"target_layer_ids": [6, 1, 4], "mask_token_id": 87, "block_size": 5},
    }
    source = torch.Generator().manual_seed(2)
    shapes = {"fc.weight": (HIDDEN, 3 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for layer in range(2):
        for name, shape in {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (60, HIDDEN),
            "self_attn.k_proj": (20, HIDDEN),
            "self_attn.v_proj": (20, HIDDEN),
            "self_attn.o_proj": (HIDDEN, 60),
            "self_attn.q_norm": (10,),
            "self_attn.k_norm": (10,),
            "mlp.gate_proj": (48, HIDDEN),
            "mlp.up_proj": (48, HIDDEN),
            "mlp.down_proj": (HIDDEN, 48),
        }.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
    weights = {name: torch.randn(shape, generator=source).mul(0.3).bfloat16() for name, shape in shapes.items()}
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    loaded = load_drafter(folder)
    assert loaded.extra == {}
    check_agreement(folder, loaded.model)
