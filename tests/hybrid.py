"""A tiny random multimodal wrapper of the Qwen3.5 kind: nested text_config, prefixed weights, mostly linear attention.

Loaded by conftest files with `importlib.util.spec_from_file_location`; the tests' import mode has no helper modules.
"""

from __future__ import annotations

from pathlib import Path

import torch

TEXT_SIZES = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
VISION_SIZES = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
IMAGE_TOKENS = {
    "image_token_id": 1010,
    "video_token_id": 1011,
    "vision_start_token_id": 1012,
    "vision_end_token_id": 1013,
}


def save_tiny_hybrid(directory: Path, tokenizer_dir: Path, **text_changes: object) -> Path:
    """Save the whole wrapper, vision part included, as one safetensors file with `model.language_model.` names.

    8 layers (6 of linear attention), hidden 64, 1,024 embedding rows; its norms multiply by 1 + weight, far from 1.
    """
    from transformers import AutoTokenizer, Qwen3_5Config, Qwen3_5ForConditionalGeneration

    config = Qwen3_5Config(text_config={**TEXT_SIZES, **text_changes}, vision_config=VISION_SIZES, **IMAGE_TOKENS)
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.model.language_model.named_parameters():
            if name.endswith("norm.weight") and "linear_attn" not in name:
                parameter.uniform_(-0.7, 2.0)
            elif parameter.ndim == 2:
                parameter.normal_(0, 0.08)
        model.lm_head.weight.normal_(0, 0.08)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(directory)
    assert (directory / "model.safetensors").is_file()
    return directory
