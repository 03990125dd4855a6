from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from dflash_pipeline.drafter.config import DrafterConfig
from dflash_pipeline.errors import CheckpointError, ConfigError

ConfigOf = Callable[..., DrafterConfig]


@pytest.mark.parametrize("kinds", ["F", "FFF", "SS", "SSF"])
def test_zlab_form_round_trips(kinds: str, config_of: ConfigOf) -> None:
    config = config_of(kinds)
    assert DrafterConfig.from_zlab(json.loads(json.dumps(config.to_zlab()))) == config


def test_zlab_form_has_every_key_other_readers_need(config_of: ConfigOf) -> None:
    config = config_of("FFF", context_layer_ids=(5, 1, 2)).to_zlab("bfloat16")
    assert config == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": 1024,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "num_target_layers": 8,
        "layer_types": ["full_attention"] * 3,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 3,
        "dtype": "bfloat16",
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "is_causal": False,
        "block_size": 8,
        "dflash_config": {"target_layer_ids": [5, 1, 2], "mask_token_id": 3, "block_size": 8},
    }


def test_sliding_layers_keep_their_window_and_leave_causality_out(config_of: ConfigOf) -> None:
    from transformers import Qwen3Config

    config = config_of("SSF").to_zlab()
    assert "is_causal" not in config
    assert config["use_sliding_window"] is True
    read = Qwen3Config(**config)
    assert read.sliding_window == 5
    assert read.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]


def published(**changes: Any) -> dict[str, Any]:
    """The form of the configurations that z-lab publishes (sizes of Qwen3.5-4B's drafter)."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "bos_token_id": None,
        "dflash_config": {"block_size": 16, "mask_token_id": 248077, "target_layer_ids": [1, 5, 9, 13, 17, 21, 25, 29]},
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "max_position_embeddings": 262144,
        "max_window_layers": 6,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 6,
        "num_key_value_heads": 8,
        "num_target_layers": 32,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
        "rope_scaling": None,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": True,
        "vocab_size": 248320,
    }
    return {**config, **changes}


def test_published_configurations_are_read() -> None:
    config = DrafterConfig.from_zlab(published())
    assert (config.block_size, config.rope_theta, config.sliding_window) == (16, 10000000, 4096)
    older = published(
        block_size=8,
        dflash_config={"mask_token_id": 5, "target_layer_ids": [1, 9]},
        layer_types=["full_attention"] * 6,
        rope_theta=1000000,
        rope_parameters=None,
        use_sliding_window=False,
        is_causal=False,
    )
    config = DrafterConfig.from_zlab(older)
    assert (config.block_size, config.rope_theta, config.sliding_window) == (8, 1000000, None)


INNER = {"block_size": 16, "mask_token_id": 5, "target_layer_ids": [1, 5]}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dflash_config": None}, "dflash_config"),
        ({"dflash_config": {**INNER, "target_layer_ids": None}}, "target_layer_ids"),
        ({"dflash_config": {**INNER, "mask_token_id": None}}, "mask_token_id"),
        ({"dflash_config": {**INNER, "block_size": None}}, "block_size"),
        ({"block_size": 8}, "block_size"),
        ({"mask_token_id": 7}, "mask_token_id"),
        ({"dflash_config": {**INNER, "target_layer_ids": [1, 1]}}, "differ"),
        ({"dflash_config": {**INNER, "target_layer_ids": [1, 32]}}, "layer id"),
        ({"dflash_config": {**INNER, "target_layer_ids": [-1]}}, "layer id"),
        ({"dflash_config": {**INNER, "target_layer_ids": []}}, "at least one layer"),
        ({"dflash_config": {**INNER, "target_layer_ids": "1,2"}}, "target_layer_ids"),
        ({"dflash_config": {**INNER, "mask_token_id": 248320}}, "mask_token_id"),
        ({"dflash_config": {**INNER, "mask_token_id": True}}, "mask_token_id"),
        ({"dflash_config": {**INNER, "causal": True}}, "causal"),
        ({"architectures": ["DFlash2DraftModel"]}, "architectures"),
        ({"model_type": "llama"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rotary"),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e7}, "rope_theta"),
        ({"rope_parameters": None}, "rope_theta"),
        ({"rope_parameters": 3}, "rope_parameters"),
        ({"input_embedding_scale": 2.0}, "input_embedding_scale"),
        ({"use_sliding_window": False}, "use_sliding_window"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 6}, "layer_types"),
        ({"layer_types": None}, "layer_types"),
        ({"sliding_window": None}, "sliding_window"),
        ({"is_causal": False}, "is_causal"),
        ({"is_causal": True}, "is_causal"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "2560"}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_key_value_heads": 5}, "num_kv_heads"),
        ({"head_dim": 127}, "head_dim"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
    ],
)
def test_a_configuration_that_is_not_understood_is_refused_in_one_line(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named) as caught:
        DrafterConfig.from_zlab(published(**changes))
    assert "\n" not in str(caught.value)


def test_a_window_without_a_sliding_layer_is_refused(config_of: ConfigOf) -> None:
    with pytest.raises(ConfigError, match="sliding_window"):
        config_of("FF", sliding_window=8)


def test_mask_token_1024_is_refused_on_1024_rows(config_of: ConfigOf) -> None:
    with pytest.raises(ConfigError, match="mask_token_id"):
        config_of(mask_token_id=1024)
