from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_pipeline.drafter.checkpoint import expected_shapes, find_drafter_dir, load_drafter, save_drafter
from dflash_pipeline.drafter.config import DrafterConfig
from dflash_pipeline.drafter.model import DFlashDrafter
from dflash_pipeline.errors import CheckpointError, ConfigError

ConfigOf = Callable[..., DrafterConfig]
DrafterOf = Callable[..., DFlashDrafter]


@pytest.fixture
def saved(tmp_path: Path, config_of: ConfigOf, drafter_of: DrafterOf) -> Path:
    save_drafter(tmp_path / "drafter", drafter_of(config_of("SF"), dtype=torch.float32), extra={"steps": 7})
    return tmp_path / "drafter"


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **changes}))


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_drafter(directory)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_tensor_names_and_shapes_are_exactly_zlabs(tmp_path: Path, config_of: ConfigOf, drafter_of: DrafterOf) -> None:
    model = drafter_of(config_of("FF", context_layer_ids=(1, 2, 4, 5, 7)), dtype=torch.float32)
    found = save_drafter(tmp_path, model)
    layer = {
        "input_layernorm.weight": (64,),
        "post_attention_layernorm.weight": (64,),
        "self_attn.q_proj.weight": (128, 64),
        "self_attn.k_proj.weight": (64, 64),
        "self_attn.v_proj.weight": (64, 64),
        "self_attn.o_proj.weight": (64, 128),
        "self_attn.q_norm.weight": (32,),
        "self_attn.k_norm.weight": (32,),
        "mlp.gate_proj.weight": (96, 64),
        "mlp.up_proj.weight": (96, 64),
        "mlp.down_proj.weight": (64, 96),
    }
    expected: dict[str, tuple[int, ...]] = {
        "fc.weight": (64, 5 * 64),
        "hidden_norm.weight": (64,),
        "norm.weight": (64,),
        **{f"layers.{index}.{name}": shape for index in range(2) for name, shape in layer.items()},
    }
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in stored.items()} == expected
    assert expected_shapes(model.config) == expected
    assert found.num_tensors == 3 + 11 * 2
    assert found.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_drafter_round_trips(dtype: str, tmp_path: Path, config_of: ConfigOf, drafter_of: DrafterOf) -> None:
    model = drafter_of(config_of("SFF"), dtype=torch.float32)
    save_drafter(tmp_path, model, dtype=dtype, extra={"cache_identity": "x", "steps": 3})
    loaded, config, extra = load_drafter(tmp_path)
    assert config == model.config == loaded.config
    assert extra == {"cache_identity": "x", "steps": 3}
    for name, value in model.state_dict().items():
        stored = value.bfloat16().float() if dtype == "bfloat16" else value
        assert torch.equal(loaded.state_dict()[name], stored)
    assert not loaded.training
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == dtype
    assert load_drafter(tmp_path, dtype=torch.bfloat16).model.fc.weight.dtype == torch.bfloat16


def test_loaded_weights_can_be_trained_and_outlive_the_file(saved: Path) -> None:
    model = load_drafter(saved).model
    (saved / "model.safetensors").unlink()
    model.fc.weight.square().sum().backward()
    assert model.fc.weight.grad is not None


def test_saving_again_replaces_both_files(saved: Path, config_of: ConfigOf, drafter_of: DrafterOf) -> None:
    model = drafter_of(config_of("FF"), seed=5, dtype=torch.float32)
    save_drafter(saved, model)
    loaded, config, extra = load_drafter(saved)
    assert (config, extra) == (model.config, {})
    assert torch.equal(loaded.norm.weight, model.norm.weight)


def test_a_crash_between_the_files_leaves_no_drafter(
    saved: Path, drafter_of: DrafterOf, config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.replace

    def failing(self: Path, target: Path) -> Path:
        if target.name == "config.json":
            raise OSError("no space left")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(OSError, match="no space"):
        save_drafter(saved, drafter_of(config_of("FF"), dtype=torch.float32))
    assert [path.name for path in saved.iterdir()] == ["model.safetensors"]
    assert "holds no drafter" in refusal(saved)


def test_a_run_folder_stands_for_its_drafter(saved: Path) -> None:
    run = saved.parent
    (run / "config.json").write_text('{"recipe": "default"}')
    assert find_drafter_dir(run) == find_drafter_dir(saved) == saved
    assert load_drafter(run).extra == {"steps": 7}


def test_folders_without_a_drafter_are_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nothing")
    assert "holds no drafter" in refusal(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000, b'{"architectures": "DFlashDraftModel"}']
)
def test_a_config_that_is_no_object_of_a_drafter_is_refused(content: bytes, saved: Path) -> None:
    (saved / "config.json").write_bytes(content)
    refusal(saved)


@pytest.mark.parametrize("key", ["target_layer_ids", "mask_token_id", "block_size"])
def test_what_a_drafter_must_say_is_never_guessed(key: str, saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    config.pop(key, None)
    config["dflash_config"].pop(key)
    (saved / "config.json").write_text(json.dumps(config))
    message = refusal(saved)
    assert key in message
    assert "never guessed" in message


def test_shapes_that_do_not_fit_the_config_are_refused(saved: Path) -> None:
    edit_config(saved, intermediate_size=97)
    assert "[96, 64], config.json asks for [97, 64]" in refusal(saved)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop("norm.weight"), "misses tensors: norm.weight"),
        (lambda tensors: tensors.pop("layers.1.self_attn.k_norm.weight"), "layers.1.self_attn.k_norm.weight"),
        (
            lambda tensors: tensors.update({"embed_tokens.weight": torch.zeros(2, 2)}),
            "has unknown tensors: embed_tokens",
        ),
        (lambda tensors: tensors.update({"fc.bias": torch.zeros(64)}), "fc.bias"),
        (
            lambda tensors: tensors.update({"fc.weight": torch.zeros(64, 64)}),
            r"[64, 64], config.json asks for [64, 128]",
        ),
        (lambda tensors: tensors.update({"fc.weight": torch.zeros(64, 128, dtype=torch.int8)}), "I8"),
        (lambda tensors: tensors.update({"fc.weight": torch.full((64, 128), float("nan"))}), "not finite"),
        (lambda tensors: tensors.update({f"model.{k}": tensors.pop(k) for k in list(tensors)}), "misses tensors"),
    ],
)
def test_tensors_that_are_not_exactly_the_drafters_are_refused(
    change: Callable[[dict[str, torch.Tensor]], object], named: str, saved: Path
) -> None:
    tensors = load_file(saved / "model.safetensors")
    change(tensors)
    save_file(tensors, saved / "model.safetensors")
    assert named in refusal(saved)


def header(value: object) -> bytes:
    data = json.dumps(value).encode() if not isinstance(value, bytes) else value
    return struct.pack("<Q", len(data)) + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 1000) + b"{}",
        header(b"{"),
        header(b"\xff\xff"),
        header({"fc.weight": {"dtype": "F32", "shape": [64, 128], "data_offsets": [0, 32768]}}),
        header({"fc.weight": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}) + b"\0" * 4,
        header({"fc.weight": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}) + b"\0" * 4,
        header({"a\nb": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}) + b"\0" * 4,
        b"\x80\x04\x95",
    ],
)
def test_a_hostile_weights_file_is_refused(content: bytes, saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(content)
    refusal(saved)


def test_a_truncated_or_missing_weights_file_is_refused(saved: Path) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    assert str(path) in refusal(saved)
    path.unlink()
    assert "missing" in refusal(saved)


def test_what_is_not_finite_is_not_saved(saved: Path, drafter_of: DrafterOf, config_of: ConfigOf) -> None:
    model = drafter_of(config_of("FF"), dtype=torch.float32)
    with torch.no_grad():
        model.fc.weight[0, 0] = float("inf")
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        save_drafter(saved, model)
    assert load_drafter(saved).extra == {"steps": 7}
    with pytest.raises(ConfigError, match="dtype"):
        save_drafter(saved, drafter_of(config_of("FF")), dtype="float16")
