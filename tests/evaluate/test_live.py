"""Live evaluation as a whole: what it saves, extracted and walked offline, gives the same figures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dflash_pipeline.drafter.checkpoint import load_drafter, save_drafter
from dflash_pipeline.drafter.config import DrafterConfig
from dflash_pipeline.drafter.model import DFlashDrafter, init_weights
from dflash_pipeline.errors import ConfigError, CorpusError
from dflash_pipeline.evaluate.live import LiveConfig, end_tokens, make_speculator, run_live
from dflash_pipeline.evaluate.measure import measure_pack
from dflash_pipeline.evaluate.offline import EvaluateConfig, run_evaluate
from dflash_pipeline.evaluate.speculate import Limits
from dflash_pipeline.extract.config import ExtractConfig
from dflash_pipeline.extract.run import run_extract
from dflash_pipeline.store import open_cache
from dflash_pipeline.target import TargetConfig, load_target
from dflash_pipeline.train.loop import TrainOptions, run_train
from dflash_pipeline.train.recipes import load_recipe

CONTRACT = {
    *("rows", "verifications", "tokens", "tau", "acceptance_rate"),
    *("lossless", "tokens_per_second", "baseline_tokens_per_second", "speedup"),
}
REPLY = 8 * 8 + 1
SETTINGS = ["num_layers=2", "anchors_per_pack=64", "pack_tokens=400", "heldout_share=0.0", "lr=1e-2", "eval_rows=1"]


def live(drafter: Path, target: Path, prompts: Path, **options: object) -> dict[str, object]:
    config = LiveConfig(drafter=drafter, target=str(target), prompts=prompts, device="cpu", **options)
    result = run_live(config, lambda _: None)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    return result


def random_drafter(directory: Path) -> Path:
    config = DrafterConfig(
        hidden_size=64, intermediate_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32,
        vocab_size=1024, block_size=8, mask_token_id=1000, context_layer_ids=(4, 1), num_target_layers=8,
        layer_types=("full_attention",),
    )  # fmt: skip
    model = DFlashDrafter(config)
    init_weights(model, torch.Generator().manual_seed(1), std=0.3)
    save_drafter(directory, model)
    return directory


@pytest.fixture(scope="module", params=["flat", "wrapper"])
def world(
    request: pytest.FixtureRequest,
    tiny_target_dir: Path,
    tiny_hybrid_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> SimpleNamespace:
    """A target, rows that it wrote, their cache, and a drafter that learned the first of them."""
    target = tiny_target_dir if request.param == "flat" else tiny_hybrid_dir
    home = tmp_path_factory.mktemp("live")
    prompts, written, one = home / "prompts.jsonl", home / "written.jsonl", home / "one.jsonl"
    rows = [{"id": f"p{n}", "source": "ab"[n % 2], "prompt_ids": [1 + n, 300, 301 + n]} for n in range(3)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    first = live(random_drafter(home / "random"), target, prompts, max_new_tokens=REPLY, save_rows=written)
    one.write_text(written.read_text(encoding="utf-8").splitlines()[0] + "\n", encoding="utf-8")
    for corpus in (written, one):
        run_extract(ExtractConfig(corpus=(corpus,), target=str(target), out=corpus.with_suffix(""), device="cpu"))
    recipe = load_recipe("default", [*SETTINGS, "steps=120"])
    run_train(TrainOptions(cache=home / "one", out=home / "run", recipe=recipe, device="cpu"), lambda _: None)
    return SimpleNamespace(target=target, home=home, prompts=prompts, written=written, first=first)


def test_saved_rows_walked_offline_need_the_same_verifications_row_by_row(
    world: SimpleNamespace, tmp_path: Path
) -> None:
    saved = tmp_path / "saved.jsonl"
    result = live(world.home / "run", world.target, world.prompts, max_new_tokens=REPLY, save_rows=saved)
    assert set(result) >= CONTRACT
    assert result["lossless"] is True
    rows = [json.loads(line) for line in saved.read_text(encoding="utf-8").splitlines()]
    before = [json.loads(line) for line in world.written.read_text(encoding="utf-8").splitlines()]
    assert [row | {"verifications": 0} for row in rows] == [row | {"verifications": 0} for row in before]
    run_extract(ExtractConfig(corpus=(saved,), target=str(world.target), out=tmp_path / "cache", device="cpu"))
    offline = run_evaluate(
        EvaluateConfig(drafter=world.home / "run", cache=tmp_path / "cache", device="cpu"), lambda _: None
    )
    for key in ("rows", "verifications", "tokens", "acceptance_rate"):
        assert result[key] == offline[key]
    assert result["tau"]["micro"] == offline["tau"]["micro"]
    assert offline["on_policy_share"] == 1.0
    cache, drafter = open_cache(tmp_path / "cache"), load_drafter(world.home / "run")
    target = load_target(TargetConfig(name=str(world.target), device="cpu"))
    speculator, limits = make_speculator(drafter, target), Limits(max_new_tokens=REPLY, eos_ids=end_tokens(target))
    for index in range(cache.num_rows):
        row = cache.read_row(index)
        name = cache.row_ids[index]
        prompt = row.tokens[: row.loss_mask.tolist().index(True)].tolist()
        walk = measure_pack(drafter.model, speculator.head, [row]).walks[0]
        assert walk == speculator.greedy(prompt, limits).walk
        assert walk.verifications == next(saved["verifications"] for saved in rows if saved["id"] == name)


def test_a_drafter_that_learned_one_row_decodes_it_a_whole_block_at_a_time(world: SimpleNamespace) -> None:
    result = live(world.home / "run", world.target, world.prompts, rows=1, max_new_tokens=REPLY)
    assert (result["verifications"], result["tokens"], result["tau"]["micro"]) == (8, 64, 8.0)
    assert result["acceptance_rate"] == [1.0] * 7


def test_what_is_not_the_targets_is_written_by_neither(world: SimpleNamespace) -> None:
    """The first run's drafter was random: its text is still the target's own."""
    assert world.first["lossless"] is True
    assert world.first["differences"] == {"ties": 0, "other": 0}
    assert set(world.first["sources"]) == {"a", "b"}
    assert world.first["sources"]["a"]["rows"] == 2
    rows = [json.loads(line) for line in world.written.read_text(encoding="utf-8").splitlines()]
    target = load_target(TargetConfig(name=str(world.target), device="cpu"))
    for row in rows:
        assert len(row["completion_ids"]) == REPLY
        assert row["finish_reason"] == "length"
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        with torch.no_grad():
            choices = target.model(ids).logits[0].argmax(-1).tolist()
        assert choices[2:-1] == row["completion_ids"]


def test_trees_are_lossless_too_and_refused_where_they_cannot_be_verified(world: SimpleNamespace) -> None:
    budgets = {"max_new_tokens": 20, "tree_budgets": (12, 0, 4)}
    if "hybrid" in str(world.target):
        with pytest.raises(ConfigError, match="without --tree-budget"):
            live(world.home / "run", world.target, world.prompts, **budgets)
        return
    result = live(world.home / "run", world.target, world.prompts, **budgets)
    assert list(result["tree"]) == ["0", "4", "12"]
    assert all(tree["lossless"] for tree in result["tree"].values())
    assert result["tree"]["0"]["tau"]["micro"] == 1.0


def test_end_tokens_stop_live_rows_and_what_is_saved(world: SimpleNamespace, tmp_path: Path) -> None:
    if "hybrid" in str(world.target):
        pytest.skip("the end tokens do not depend on the kind of layers")
    rows = [json.loads(line) for line in world.written.read_text(encoding="utf-8").splitlines()]
    end = rows[0]["completion_ids"][10]
    copy = shutil.copytree(world.target, tmp_path / "target")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 1023]}), encoding="utf-8")
    assert end_tokens(load_target(TargetConfig(name=str(copy), device="cpu"))) == {end, 1023}
    live(world.home / "run", copy, world.prompts, max_new_tokens=REPLY, save_rows=tmp_path / "saved.jsonl")
    for before, line in zip(rows, (tmp_path / "saved.jsonl").read_text(encoding="utf-8").splitlines(), strict=True):
        after, whole = json.loads(line), before["completion_ids"]
        stops = end in whole
        assert after["completion_ids"] == (whole[: whole.index(end) + 1] if stops else whole)
        assert after["finish_reason"] == ("stop" if stops else "length")


def test_sampling_gives_figures_without_a_claim_of_equality(world: SimpleNamespace) -> None:
    result = live(world.home / "run", world.target, world.prompts, max_new_tokens=12, temperature=0.8)
    assert result["lossless"] is None
    assert result["tau"]["micro"] >= 1
    again = live(world.home / "run", world.target, world.prompts, max_new_tokens=12, temperature=0.8)
    assert again["verifications"] == result["verifications"]  # one seed, one text


def test_what_does_not_fit_is_refused_before_decoding(
    world: SimpleNamespace, tmp_path: Path, kit: SimpleNamespace
) -> None:
    save_drafter(tmp_path / "other", kit.random_drafter())
    with pytest.raises(ConfigError, match=r"target .*: hidden size 64, the drafter's is 32"):
        live(tmp_path / "other", world.target, world.prompts)
    with pytest.raises(ConfigError, match="exists already"):
        live(world.home / "run", world.target, world.prompts, save_rows=world.written)
    with pytest.raises(ConfigError, match="not there or cannot be written"):
        live(world.home / "run", world.target, world.prompts, save_rows=tmp_path / "none" / "rows.jsonl")
    with pytest.raises(ConfigError, match="without --temperature"):
        live(world.home / "run", world.target, world.prompts, tree_budgets=(4,), temperature=1.0)
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt_ids": [1] * 4095}), encoding="utf-8")
    with pytest.raises(CorpusError, match="longer than 4094 tokens"):
        live(world.home / "run", world.target, tmp_path / "long.jsonl")
