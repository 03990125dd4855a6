"""Extraction end to end on tiny targets: what is stored is what the live target computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_pipeline.errors import CacheCorrupt, CacheMismatch, ConfigError, TargetError
from dflash_pipeline.extract import ExtractConfig, forward, run, run_extract
from dflash_pipeline.store import CacheReader, Row, open_cache
from dflash_pipeline.store.plan import read_plan
from dflash_pipeline.target import Target, TargetConfig, load_target

Settings = Callable[..., ExtractConfig]
KEYS = {
    "cache", "rows", "tokens", "resumed_rows", "skipped", "seconds", "tokens_per_second", "state_bytes",
    "raw_state_bytes", "identity", "fingerprint", "dropped", "estimated_bytes", "notices", "duplicates",
    "skipped_places",
}  # fmt: skip


class Extracted:
    """A finished extraction and the live target it came from."""

    def __init__(self, config: ExtractConfig) -> None:
        self.config = config
        self.result = run_extract(config)
        self.cache: CacheReader = open_cache(config.out)
        self.target: Target = load_target(config.target_config())
        indices = range(self.cache.num_rows)
        self.rows: list[Row] = [self.cache.read_row(index, final=config.keep_final) for index in indices]


@pytest.fixture(scope="module", params=["flat", "flat-bfloat16", "hybrid"])
def extracted(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_target_dir: Path,
    tiny_hybrid_dir: Path,
    chat_corpus: Path,
) -> Extracted:
    """Thirty-seven rows in several shards, all eight layers."""
    config = ExtractConfig(
        corpus=(chat_corpus,),
        target=str(tiny_hybrid_dir if request.param == "hybrid" else tiny_target_dir),
        out=tmp_path_factory.mktemp("run") / "cache",
        layers="0,1,2,3,4,5,6,7",
        dtype="bfloat16" if request.param == "flat-bfloat16" else None,
        device="cpu",
        batch_tokens=500,
        shard_tokens=1500,
        keep_final=True,
    )
    return Extracted(config)


def live(target: Target, rows: list[Row]) -> tuple[dict[int, Tensor], Tensor]:
    """An independent forward of rows in one right-padded batch: all layer outputs and the whole model's logits."""
    length = max(len(row.tokens) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row.tokens)] = row.tokens
        mask[index, : len(row.tokens)] = 1
    states: dict[int, Tensor] = {}
    handles = [
        layer.register_forward_hook(
            lambda _m, _a, output, index=index: states.__setitem__(
                index, (output[0] if isinstance(output, tuple) else output).clone()
            )
        )
        for index, layer in enumerate(target.model.model.layers)
    ]
    with torch.no_grad():
        logits = target.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return states, logits


def lowest_argmax(logits: Tensor) -> Tensor:
    return (logits == logits.max(-1, keepdim=True).values).int().argmax(-1)


def test_the_result_has_the_promised_keys_and_is_json(extracted: Extracted) -> None:
    assert set(extracted.result) == KEYS
    assert json.loads(json.dumps(extracted.result)) == extracted.result
    assert extracted.result["rows"] == extracted.cache.num_rows == 37
    assert extracted.result["tokens"] == sum(len(row.tokens) for row in extracted.rows)
    assert extracted.cache.num_shards > 2
    assert extracted.result["raw_state_bytes"] == extracted.result["tokens"] * 8 * 64 * extracted.target.dtype.itemsize
    assert 0 < extracted.result["state_bytes"] < extracted.result["raw_state_bytes"]
    assert extracted.result["fingerprint"] == extracted.cache.fingerprint


def test_every_stored_state_equals_a_hook_bit_for_bit_in_the_planned_batch(extracted: Extracted) -> None:
    plan = read_plan(extracted.config.out)
    for shard in range(plan.num_shards):
        for batch in plan.batches(shard):
            rows = [extracted.rows[index] for index in batch]
            states, logits = live(extracted.target, rows)
            for place, row in enumerate(rows):
                for layer_id in range(8):
                    assert torch.equal(row.states[layer_id], states[layer_id][place, : len(row.tokens)])
                assert row.final is not None
                assert torch.equal(row.final, row.states[7])
                best = lowest_argmax(logits[place, : len(row.tokens)])
                assert torch.equal(row.top_ids[:, 0].long(), best)


def test_every_stored_row_equals_a_fresh_forward_of_its_ids_within_noise(extracted: Extracted) -> None:
    low = 0.99999 if extracted.target.dtype == torch.float32 else 0.999
    for row in extracted.rows[::6]:
        states, logits = live(extracted.target, [row])
        for layer_id in range(8):
            cosine = torch.cosine_similarity(row.states[layer_id].float(), states[layer_id][0].float(), dim=-1)
            assert cosine.min() > low
        logprobs = torch.log_softmax(logits[0].float(), dim=-1).gather(-1, row.top_ids.long())
        assert torch.allclose(logprobs, row.top_logprobs, atol=1e-3 if low > 0.9999 else 0.15)


def test_labels_rebuilt_from_the_cache_equal_the_live_argmax(extracted: Extracted) -> None:
    head = extracted.cache.head()
    assert float((head.norm - 1).abs().max()) > 0.5
    agree = total = 0
    for row in extracted.rows:
        x = row.states[7].float()
        normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + head.norm_eps) * head.norm.float()
        rebuilt = (normal @ head.head_weight.float().T).argmax(-1)
        agree += int((rebuilt == row.top_ids[:, 0]).sum())
        total += len(rebuilt)
    assert agree == total if extracted.target.dtype == torch.float32 else agree / total > 0.95


def test_the_cache_holds_what_a_trainer_needs_of_the_target(extracted: Extracted) -> None:
    from transformers import AutoTokenizer

    embed, lm_head, norm, eps = extracted.target.head_tensors()
    head = extracted.cache.head()
    assert torch.equal(head.embed_tokens, embed)
    assert lm_head is not None
    assert torch.equal(head.head_weight, lm_head)
    assert torch.equal(head.norm.float(), norm)
    assert head.norm_eps == eps
    assert extracted.cache.target_config()["head_dim"] == 32
    tokenizer = AutoTokenizer.from_pretrained(extracted.cache.target_dir)
    row = extracted.rows[0]
    reply = tokenizer.decode(row.tokens[row.loss_mask])
    assert reply.endswith("<|im_end|>")
    assert "<|im_start|>" not in reply


def test_rows_and_masks_are_those_of_the_corpus(extracted: Extracted, chat_corpus: Path) -> None:
    corpus = {row["id"]: row for row in map(json.loads, chat_corpus.read_text().splitlines())}
    assert {row.id for row in extracted.rows} == set(corpus)
    tokenizer = extracted.target.tokenizer
    for index, row in enumerate(extracted.rows):
        ids = tokenizer.apply_chat_template(corpus[row.id]["messages"], tokenize=True, return_dict=True)["input_ids"]
        assert row.tokens.tolist() == ids[:-1]  # the line break after the end token is never read
        reply = tokenizer.decode(row.tokens[row.loss_mask])
        assert reply == corpus[row.id]["messages"][1]["content"] + "<|im_end|>"
        assert int(extracted.cache.num_prompt_tokens[index]) == int(row.loss_mask.int().argmax())


def test_the_default_layers_are_five(settings: Settings) -> None:
    config = settings(limit_rows=2)
    run_extract(config)
    assert open_cache(config.out).layer_ids == (1, 2, 3, 4, 5)


def test_another_batch_size_gives_the_same_rows_within_noise(settings: Settings, tmp_path: Path) -> None:
    first, second = settings(limit_rows=9), settings(limit_rows=9, batch_tokens=1, out=tmp_path / "single")
    assert run_extract(first)["identity"] != run_extract(second)["identity"]
    ours, theirs = open_cache(first.out), open_cache(second.out)
    for index in range(9):
        one, other = ours.read_row(index), theirs.read_row(index)
        assert one.id == other.id
        assert torch.equal(one.tokens, other.tokens)
        for layer_id in ours.layer_ids:
            assert torch.allclose(one.states[layer_id], other.states[layer_id], rtol=1e-4, atol=1e-4)


def test_limits_leave_a_complete_cache(settings: Settings, tmp_path: Path) -> None:
    assert run_extract(settings(limit_rows=5))["rows"] == 5
    config = settings(limit_tokens=500, out=tmp_path / "tokens")
    result = run_extract(config)
    assert 350 < result["tokens"] <= 500
    assert open_cache(config.out).num_rows == result["rows"]


def test_a_length_limit_above_the_targets_own_is_lowered_and_said(settings: Settings) -> None:
    result = run_extract(settings(limit_rows=2, max_length=99_999))
    assert result["notices"] == ["the target reads at most 4096 tokens, so --max-length 99999 is 4096"]


def test_a_run_again_resumes_and_changes_nothing(settings: Settings) -> None:
    config = settings(limit_rows=12)
    first = run_extract(config)
    again = run_extract(config)
    assert first["resumed_rows"] == 0
    assert again["resumed_rows"] == 12
    assert again["tokens_per_second"] == 0.0
    assert again["fingerprint"] == first["fingerprint"]


def test_a_finished_extraction_run_again_loads_no_weights(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tiny_target_dir: Path, tmp_path: Path
) -> None:
    """It still proves that the target's weights are those of the cache; others are refused as ever."""
    config = settings(limit_rows=12)
    first = run_extract(config)
    other = Path(shutil.copytree(tiny_target_dir, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CacheMismatch, match="target_fingerprint is"):
        run_extract(settings(limit_rows=12, target=str(other)))
    monkeypatch.setattr(run, "load_target", lambda *_: pytest.fail("the target is loaded"))
    again = run_extract(config)
    changing = ("seconds", "tokens_per_second", "resumed_rows")
    assert {key: again[key] for key in again if key not in changing} == {
        key: first[key] for key in first if key not in changing
    }
    assert (set(again), again["resumed_rows"], again["tokens_per_second"]) == (KEYS, 12, 0.0)
    shard = next((config.out / "shards/00000/states/1").rglob("c/0/0"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CacheCorrupt, match="shards/00000"):
        run_extract(config)


def test_a_finished_extraction_whose_files_say_too_little_loads_the_target(
    settings: Settings, tiny_hybrid_dir: Path
) -> None:
    config = settings(limit_rows=3, target=str(tiny_hybrid_dir))
    first, again = run_extract(config), run_extract(config)
    assert (again["fingerprint"], again["resumed_rows"]) == (first["fingerprint"], 3)


def test_what_can_be_refused_without_the_target_is_refused_before_it_is_loaded(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chat_corpus: Path
) -> None:
    run_extract(settings(limit_rows=4))
    unfinished = Path(shutil.copytree(tmp_path / "cache", tmp_path / "unfinished"))
    (unfinished / "manifest.json").unlink()
    (tmp_path / "file").write_text("no cache")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    other = tmp_path / "other.jsonl"
    other.write_text("".join(chat_corpus.read_text().splitlines(keepends=True)[4:9]))
    monkeypatch.setattr(run, "load_target", lambda *_: pytest.fail("the target is loaded"))
    for out in (tmp_path / "cache", unfinished):
        for changes, field in (
            ({"max_length": 100}, "max_length is 4096 there, 100 now"),
            ({"corpus": (other,)}, r"corpus is chat.jsonl \([0-9,]+ bytes, sha256 .*\) there, other.jsonl \(.* now"),
            ({"dtype": "bfloat16"}, "dtype is float32 there, bfloat16 now"),
            ({"layers": "1,2"}, r"layer_ids is \[1, 2, 3, 4, 5\] there, \[1, 2\] now"),
            ({"limit_rows": 5}, "limit_rows is 4 there, 5 now"),
        ):
            with pytest.raises(CacheMismatch, match=field) as caught:
                run_extract(settings(**{"limit_rows": 4, "out": out, **changes}))
            assert "\n" not in str(caught.value)
    for place, message in (
        ("file", "is a file"),
        ("file/cache", "cannot be made, for .*file is a file"),
        ("link", "link: is a link to nothing; use another --out"),
        ("folder", "holds 'thesis.txt' and no cache"),
    ):
        with pytest.raises(CacheMismatch, match=message):
            run_extract(settings(out=tmp_path / place))


def test_a_run_again_with_other_inputs_is_refused_naming_the_field(
    settings: Settings, tmp_path: Path, tiny_target_dir: Path, chat_corpus: Path
) -> None:
    run_extract(settings(limit_rows=4))
    lines = chat_corpus.read_text().splitlines(keepends=True)
    reordered = tmp_path / "reordered.jsonl"
    reordered.write_text("".join(reversed(lines)))
    edited = tmp_path / "edited"
    shutil.copytree(tiny_target_dir, edited)
    template = edited / "chat_template.jinja"
    template.write_text(template.read_text() + "{# edited #}")
    for changes, field in (
        ({"max_length": 100}, "max_length"),
        ({"corpus": (reordered,)}, "corpus"),
        ({"target": str(edited)}, "template_hash"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"layers": "1,2"}, "layer_ids"),
        ({"attention": "eager"}, "attention"),
        ({"top_k": 4}, "top_k"),
    ):
        with pytest.raises(CacheMismatch, match=field) as caught:
            run_extract(settings(limit_rows=4, **changes))
        assert "\n" not in str(caught.value)


def test_a_target_that_moved_is_the_same_target(settings: Settings, tmp_path: Path, tiny_target_dir: Path) -> None:
    first = run_extract(settings(limit_rows=4))
    moved = tmp_path / "my target"
    shutil.copytree(tiny_target_dir, moved)
    again = run_extract(settings(limit_rows=4, target=str(moved)))
    assert (again["resumed_rows"], again["identity"]) == (4, first["identity"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": "1,9"}, "layer ids 9: the target has 8 layers"),
        ({"layers": "1,1"}, "named twice"),
        ({"layers": "-1"}, "layer ids -1"),
        ({"top_k": 2000}, "vocabulary has 1024 entries"),
    ],
)
def test_options_that_do_not_fit_the_target_leave_nothing_behind(
    settings: Settings, changes: dict[str, Any], message: str
) -> None:
    config = settings(**changes)
    with pytest.raises(ConfigError, match=message):
        run_extract(config)
    assert not config.out.exists()


def break_layer(monkeypatch: pytest.MonkeyPatch, broken: Callable[[Row], bool], value: float) -> None:
    """Let layer 3 return a value for every position of some rows, as a broken kernel would."""
    real = forward._take_row

    def take(*args: Any) -> Row:
        row = real(*args)
        if broken(row):
            row.states[3].mul_(0).add_(value)
        return row

    monkeypatch.setattr(forward, "_take_row", take)


@pytest.mark.parametrize(
    ("value", "reason"),
    [(0.0, "all-zero state"), (float("nan"), "non-finite state"), (float("inf"), "non-finite state")],
)
def test_rows_with_faulty_states_are_dropped_counted_and_reported(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, value: float, reason: str
) -> None:
    bad = {"row-0-3", "row-0-5"}
    break_layer(monkeypatch, lambda row: row.id in bad, value)
    config = settings(limit_rows=8)
    result = run_extract(config)
    assert result["dropped"] == {reason: 2}
    assert result["rows"] == 6
    assert bad.isdisjoint(open_cache(config.out).row_ids)
    said = " ".join(result["notices"])
    assert all(row_id in said for row_id in bad)
    assert reason in said


def test_a_single_dead_position_is_enough(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    real = forward._take_row

    def take(*args: Any) -> Row:
        row = real(*args)
        if row.id == "row-0-1":
            row.states[2][-1] = 0
        return row

    monkeypatch.setattr(forward, "_take_row", take)
    assert run_extract(settings(limit_rows=4))["dropped"] == {"all-zero state": 1}


def test_if_every_row_is_faulty_the_extraction_fails(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    break_layer(monkeypatch, lambda _: True, float("nan"))
    config = settings(limit_rows=4)
    with pytest.raises(TargetError, match="every one of the 4 rows was dropped"):
        run_extract(config)
    assert not (config.out / "manifest.json").exists()


def test_a_target_without_memory_for_a_batch_says_what_to_change(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: Any, **_kwargs: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(forward, "capture", full)
    with pytest.raises(TargetError, match="use a smaller --batch-tokens than 500"):
        run_extract(settings(limit_rows=2))


def test_the_settings_of_a_loaded_target_are_those_of_the_extraction(settings: Settings) -> None:
    config = settings(dtype="bfloat16", attention="eager", revision="main")
    assert config.target_config() == TargetConfig(
        name=config.target, dtype="bfloat16", attention="eager", device="cpu", revision="main"
    )
