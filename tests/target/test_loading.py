"""Loading: flat and nested targets are understood, everything else is refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_pipeline.errors import TargetError
from dflash_pipeline.target import Target, TargetConfig, load_target
from dflash_pipeline.target.describe import describe_target
from dflash_pipeline.target.loading import slow_bfloat16_notice


def config(directory: Path, **changes: Any) -> TargetConfig:
    return TargetConfig(**{"name": str(directory), "device": "cpu", **changes})


def refused(directory: Path | str, **changes: Any) -> str:
    with pytest.raises(TargetError) as caught:
        load_target(config(Path(directory), **changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def save_flat(directory: Path, tokenizer_dir: Path, model: Any) -> Path:
    model.save_pretrained(directory)
    shutil.copytree(tokenizer_dir, directory, dirs_exist_ok=True)
    return directory


def test_a_loaded_target_is_frozen_and_says_what_it_is(tiny_target: Target) -> None:
    assert not tiny_target.model.training
    assert not any(parameter.requires_grad for parameter in tiny_target.model.parameters())
    assert (tiny_target.hidden_size, tiny_target.num_layers, tiny_target.vocab_size) == (64, 8, 1024)
    assert tiny_target.dtype == torch.float32
    assert len(tiny_target.fingerprint) == len(tiny_target.tokenizer_hash) == len(tiny_target.template_hash) == 32
    assert tiny_target.description.max_length == 4096
    assert tiny_target.revision is None


def test_head_tensors_are_the_ones_that_are_really_used(tiny_target: Target, tiny_hybrid: Target) -> None:
    for target, added in ((tiny_target, 0.0), (tiny_hybrid, 1.0)):
        embed, head, norm, eps = target.head_tensors()
        assert torch.equal(embed, target.model.get_input_embeddings().weight)
        assert head is not None
        assert torch.equal(head, target.model.lm_head.weight)
        assert torch.equal(norm, added + target.model.model.norm.weight.float())
        assert eps == 1e-6


def test_the_multimodal_wrapper_is_loaded_as_its_language_model(tiny_hybrid: Target) -> None:
    assert tiny_hybrid.config.model_type == "qwen3_5_text"
    assert tiny_hybrid.num_layers == 8
    assert list(tiny_hybrid.config.layer_types).count("linear_attention") == 6
    assert not any("visual" in name for name, _ in tiny_hybrid.model.named_parameters())
    assert tiny_hybrid.notices == []


def test_the_language_model_of_the_wrapper_equals_the_whole_wrapper(tiny_hybrid: Target, tiny_hybrid_dir: Path) -> None:
    from transformers import Qwen3_5ForConditionalGeneration

    whole = Qwen3_5ForConditionalGeneration.from_pretrained(tiny_hybrid_dir).eval()
    ids = torch.randint(0, 1000, (2, 70))
    with torch.no_grad():
        assert torch.equal(whole(input_ids=ids).logits, tiny_hybrid.model(input_ids=ids).logits)


def test_a_wrapper_without_a_language_model_class_is_loaded_whole(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    text = {**sizes, "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 512}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    tokens = {
        "image_token_id": 1010,
        "video_token_id": 1011,
        "vision_start_token_id": 1012,
        "vision_end_token_id": 1013,
    }
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens))
    target = load_target(config(save_flat(tmp_path / "vl", tiny_tokenizer_dir, model)))
    assert type(target.model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert target.num_layers == 3
    assert target.parts.layers is target.model.model.language_model.layers


def test_tied_heads_are_seen_and_stored_once(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=1024, tie_word_embeddings=True))
    target = load_target(config(save_flat(tmp_path / "tied", tiny_tokenizer_dir, model)))
    assert target.parts.tied
    assert target.head_tensors()[1] is None


def test_the_checkpoints_own_dtype_is_the_default(tmp_path: Path, tiny_target_dir: Path, tiny_target: Target) -> None:
    from transformers import AutoModelForCausalLM

    shutil.copytree(tiny_target_dir, tmp_path / "bf16")
    AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.bfloat16).save_pretrained(tmp_path / "bf16")
    own = load_target(config(tmp_path / "bf16"))
    assert own.dtype == torch.bfloat16
    assert load_target(config(tmp_path / "bf16", dtype="float32")).dtype == torch.float32
    assert own.fingerprint != tiny_target.fingerprint
    AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.float16).save_pretrained(tmp_path / "bf16")
    assert "its checkpoint is float16" in refused(tmp_path / "bf16")
    settings = json.loads((tmp_path / "bf16" / "config.json").read_text())
    settings.pop("dtype")
    (tmp_path / "bf16" / "config.json").write_text(json.dumps(settings))
    assert describe_target(config(tmp_path / "bf16")).dtype == "float32"


def test_the_fingerprint_depends_on_weights_and_not_on_files(
    tmp_path: Path, tiny_target_dir: Path, tiny_target: Target
) -> None:
    split = tmp_path / "renamed and split"
    shutil.copytree(tiny_target_dir, split)
    (split / "model.safetensors").unlink()
    tiny_target.model.save_pretrained(split, max_shard_size="300KB")
    assert len(list(split.glob("model-*.safetensors"))) > 1
    again = load_target(config(split))
    assert again.fingerprint == tiny_target.fingerprint
    with torch.no_grad():
        again.model.model.layers[3].mlp.up_proj.weight[5, 7] += 1e-4
    del again.fingerprint
    assert again.fingerprint != tiny_target.fingerprint


def test_tokenizer_and_template_hashes_see_an_edit(tmp_path: Path, tiny_target_dir: Path, tiny_target: Target) -> None:
    edited = tmp_path / "edited"
    shutil.copytree(tiny_target_dir, edited)
    template = edited / "chat_template.jinja"
    template.write_text(template.read_text() + "{# edited #}")
    found = describe_target(config(edited))
    assert found.template_hash != tiny_target.template_hash
    assert found.tokenizer_hash == tiny_target.tokenizer_hash
    text = (edited / "tokenizer.json").read_text()
    (edited / "tokenizer.json").write_text(text.replace("<|im_start|>", "<|im_begin|>"))
    assert describe_target(config(edited)).tokenizer_hash != tiny_target.tokenizer_hash


def test_saved_files_give_back_tokenizer_template_and_sizes(tmp_path: Path, tiny_hybrid: Target) -> None:
    from transformers import AutoTokenizer

    tiny_hybrid.save_files(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert (settings["hidden_size"], settings["head_dim"], settings["model_type"]) == (64, 32, "qwen3_5_text")
    assert settings["rope_parameters"]["rope_theta"] == 10000.0
    assert "_name_or_path" not in settings
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.get_vocab() == tiny_hybrid.tokenizer.get_vocab()
    assert again.chat_template == tiny_hybrid.tokenizer.chat_template


def test_a_missing_or_wrong_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    assert "there is no such folder" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refused(tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    assert "this is a file" in refused(tmp_path / "file")
    (tmp_path / "empty" / "config.json").write_text("{not json")
    assert "configuration cannot be read" in refused(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "no_such_model"}')
    assert "configuration cannot be read" in refused(tmp_path / "empty")


def test_bad_options_are_refused(tiny_target_dir: Path) -> None:
    with pytest.raises(TargetError, match="dtype 'float16': expected one of bfloat16, float32"):
        config(tiny_target_dir, dtype="float16")
    with pytest.raises(TargetError, match="device 'cuda:99'"):
        config(tiny_target_dir, device="cuda:99")
    with pytest.raises(TargetError, match="device 'quantum'"):
        config(tiny_target_dir, device="quantum")
    with pytest.raises(TargetError, match="has no name"):
        TargetConfig(name="")
    assert "cannot be loaded" in refused(tiny_target_dir, attention="telepathy")


def test_missing_weights_are_refused_and_never_random(tmp_path: Path, tiny_target_dir: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_target_dir, broken)
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert "1 weights are missing from its checkpoint, such as model.layers.2.mlp.up_proj.weight" in refused(broken)
    (broken / "model.safetensors").unlink()
    assert "cannot be loaded" in refused(broken)
    (broken / "model.safetensors").write_bytes(b"garbage")
    assert "cannot be loaded" in refused(broken)


def test_weights_that_are_not_used_are_reported(tmp_path: Path, tiny_target_dir: Path) -> None:
    more = tmp_path / "more"
    shutil.copytree(tiny_target_dir, more)
    weights = load_file(more / "model.safetensors")
    weights["model.extra.weight"] = torch.ones(3)
    save_file(weights, more / "model.safetensors", metadata={"format": "pt"})
    assert "1 tensors that the language model does not use" in load_target(config(more)).notices[0]


def test_a_missing_tokenizer_is_refused(tmp_path: Path, tiny_target_dir: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_target_dir / name, bare)
    assert "its tokenizer has no vocabulary" in refused(bare)


def test_another_kind_of_model_is_refused(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    from transformers import T5Config, ViTConfig

    for settings, message in (
        (T5Config(d_model=8, num_layers=1, vocab_size=1024), "encoder-decoder"),
        (ViTConfig(hidden_size=8, num_hidden_layers=1), "vocab_size"),
    ):
        directory = tmp_path / settings.model_type
        settings.save_pretrained(directory)
        shutil.copytree(tiny_tokenizer_dir, directory, dirs_exist_ok=True)
        assert message in refused(directory)


def test_slow_bfloat16_is_noticed_only_where_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_pipeline.target import loading

    cpu = torch.device("cpu")
    monkeypatch.setattr(loading, "_matmul_seconds", lambda dtype: 0.5 if dtype == torch.bfloat16 else 0.02)
    assert "--dtype float32 would be faster" in slow_bfloat16_notice("bfloat16", cpu)[0]
    assert slow_bfloat16_notice("float32", cpu) == []
    assert slow_bfloat16_notice("bfloat16", torch.device("cuda")) == []
    monkeypatch.setattr(loading, "_matmul_seconds", lambda _dtype: 0.02)
    assert slow_bfloat16_notice("bfloat16", cpu) == []
