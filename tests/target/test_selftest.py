"""The self-test refuses targets whose logits the cache could not rebuild."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_pipeline.errors import TargetError
from dflash_pipeline.target import Target, TargetConfig, load_target
from dflash_pipeline.target.norm import EffectiveNorm
from dflash_pipeline.target.selftest import check_target

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
}


def refusal(directory: Path, tokenizer_dir: Path, model: Any) -> str:
    torch.manual_seed(0)
    model.save_pretrained(directory)
    shutil.copytree(tokenizer_dir, directory, dirs_exist_ok=True)
    with pytest.raises(TargetError) as caught:
        load_target(TargetConfig(name=str(directory), device="cpu", attention="eager"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_scaled_embeddings_are_refused(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GemmaConfig, GemmaForCausalLM

    gemma = GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=16))
    assert "scales its embeddings" in refusal(tmp_path / "gemma", tiny_tokenizer_dir, gemma)
    gemma3 = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=16))
    assert "scales its embeddings" in refusal(tmp_path / "gemma3", tiny_tokenizer_dir, gemma3)


def test_capped_logits_are_refused(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    model = Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=30.0))
    assert "caps its logits" in refusal(tmp_path / "gemma2", tiny_tokenizer_dir, model)


def test_scaled_logits_are_refused(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    model = GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0, embedding_multiplier=1.0))
    assert "do not give its own logits" in refusal(tmp_path / "granite", tiny_tokenizer_dir, model)


def test_layer_norms_and_learned_positions_are_refused(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=1024, n_positions=64))
    assert "not an RMSNorm" in refusal(tmp_path / "gpt2", tiny_tokenizer_dir, model)


def test_a_head_with_a_bias_is_refused(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    from transformers import PhiConfig, PhiForCausalLM

    model = PhiForCausalLM(PhiConfig(**SIZES))
    assert "its head has a bias" in refusal(tmp_path / "phi", tiny_tokenizer_dir, model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_norm_weight_does_not_pass(tiny_target_dir: Path, dtype: str) -> None:
    target = load_target(TargetConfig(name=str(tiny_target_dir), device="cpu", dtype=dtype))
    wrong = EffectiveNorm(1.0 + target.norm.weight, target.norm.eps)
    with pytest.raises(TargetError, match="do not give its own logits"):
        check_target(target.model, target.parts, wrong, [1, 2, 3])


def test_states_that_are_changed_between_layers_are_refused(tiny_target: Target) -> None:
    def nudge(_module: Any, args: Any, kwargs: Any) -> Any:
        return ((args[0] * 1.001, *args[1:]), kwargs)

    handle = tiny_target.parts.layers[4].register_forward_pre_hook(nudge, with_kwargs=True)
    try:
        with pytest.raises(TargetError, match="layer 4 does not read what layer 3 returned"):
            check_target(tiny_target.model, tiny_target.parts, tiny_target.norm, [1, 2, 3])
    finally:
        handle.remove()


def test_values_that_are_not_finite_are_refused(tiny_target: Target) -> None:
    handle = tiny_target.parts.layers[7].register_forward_hook(lambda _m, _a, output: output * float("nan"))
    try:
        with pytest.raises(TargetError, match="not finite"):
            check_target(tiny_target.model, tiny_target.parts, tiny_target.norm, [1, 2, 3])
    finally:
        handle.remove()


def test_no_hook_is_left_behind(tiny_target: Target) -> None:
    check_target(tiny_target.model, tiny_target.parts, tiny_target.norm, [1, 2, 3])
    with pytest.raises(TargetError, match="fails on its first forward"):
        check_target(tiny_target.model, tiny_target.parts, tiny_target.norm, [10**6])
    for layer in tiny_target.parts.layers:
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks
