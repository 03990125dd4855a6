"""Steps with a cache equal whole forwards, whatever was taken back in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM

from dflash_pipeline.errors import ConfigError, TargetError
from dflash_pipeline.target import Target, TargetConfig, capture, load_target
from dflash_pipeline.target.decode import TargetDecoder, check_decoding

IDS = torch.randint(1, 1000, (40,), generator=torch.Generator().manual_seed(1)).tolist()
OTHER = torch.randint(1, 1000, (9,), generator=torch.Generator().manual_seed(2)).tolist()
LAYERS = (4, 1)


@pytest.fixture(scope="module")
def tiny_sliding(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> Target:
    """A target whose layers all see a window of 6 tokens."""
    directory = tmp_path_factory.mktemp("sliding")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(vocab_size=1024, num_key_value_heads=2, sliding_window=6, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.1)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(tiny_tokenizer_dir).save_pretrained(directory)
    return load_target(TargetConfig(name=str(directory), device="cpu"))


@pytest.fixture(params=["tiny_target", "tiny_hybrid", "tiny_sliding"])
def target(request: pytest.FixtureRequest) -> Target:
    found: Target = request.getfixturevalue(request.param)
    return found


def whole(target: Target, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and states of one forward without a cache, by the model itself and by the room's own capture."""
    with torch.no_grad():
        logits = target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    states = capture(target, torch.tensor([ids]), [len(ids)], layer_ids=LAYERS, top_k=1).states
    return logits, torch.cat([states[layer][0] for layer in LAYERS], dim=1)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).norm() <= 1e-4 * expected.norm())


def test_steps_with_drafts_taken_back_equal_one_forward(target: Target) -> None:
    decoder = TargetDecoder(target, LAYERS)
    logits, states = whole(target, IDS)
    first = decoder.extend(IDS[:17], last_only=True)
    assert first.logits.shape == (1, 1024)
    assert close(first.logits, logits[16:17])
    assert close(first.states, states[:17])
    done = 17
    for accepted, wrong in [(0, 7), (3, 4), (1, 1), (7, 0), (2, 5), (0, 1), (3, 3)]:  # more than a window in all
        step = decoder.extend(IDS[done : done + 1 + accepted] + OTHER[:wrong])
        assert close(step.logits[: accepted + 1], logits[done : done + accepted + 1])
        assert close(step.states[: accepted + 1], states[done : done + accepted + 1])
        done += accepted + 1
        decoder.keep(done)
        assert decoder.tokens == IDS[:done]


def test_a_branch_of_a_tree_sees_its_ancestors_alone_and_can_be_kept(tiny_target: Target) -> None:
    decoder = TargetDecoder(tiny_target, LAYERS)
    decoder.extend(IDS[:9])
    tree = [IDS[9], *OTHER[:6]]
    parents = [-1, 0, 0, 1, 2, 2, 5]
    step = decoder.extend(tree, parents=parents)
    for node in range(len(tree)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        logits, states = whole(tiny_target, IDS[:9] + [tree[place] for place in path])
        assert close(step.logits[node : node + 1], logits[-1:])
        assert close(step.states[node : node + 1], states[-1:])
    decoder.keep_path([0, 2, 5])
    row = IDS[:9] + [tree[place] for place in (0, 2, 5)]
    assert decoder.tokens == row
    assert close(decoder.extend(OTHER[:3]).logits, whole(tiny_target, row + OTHER[:3])[0][-3:])


@pytest.mark.parametrize("name", ["tiny_hybrid", "tiny_sliding"])
def test_a_target_without_plain_attention_refuses_a_tree(name: str, request: pytest.FixtureRequest) -> None:
    decoder = TargetDecoder(request.getfixturevalue(name))
    decoder.extend(IDS[:9])
    assert not decoder.can_branch
    with pytest.raises(ConfigError, match="without --tree-budget"):
        decoder.extend([1, 2, 3], parents=[-1, 0, 0])


def test_tokens_before_the_last_step_cannot_be_taken_back(tiny_target: Target) -> None:
    decoder = TargetDecoder(tiny_target)
    decoder.extend(IDS[:9])
    decoder.extend(IDS[9:12])
    with pytest.raises(ConfigError, match="the last step took 9 to 12"):
        decoder.keep(8)
    with pytest.raises(ConfigError, match="expected an earlier node"):
        decoder.extend([1, 2], parents=[-1, 1])


def test_a_target_whose_cache_cannot_go_on_is_refused(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    check_decoding(target)
    monkeypatch.setattr(TargetDecoder, "keep", lambda *_: None)
    with pytest.raises(TargetError, match="cannot go on after a rejected draft"):
        check_decoding(target)
