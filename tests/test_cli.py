"""The whole path through the command line, on T and on the multimodal wrapper; JSON keys and one-line errors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors import SafetensorError

from dflash_pipeline.cli import main

SMALL = ["anchors_per_pack=12", "pack_tokens=400", "num_layers=2", "eval_rows=2", "heldout_share=0.2"]
SETS = [word for setting in SMALL for word in ("--set", setting)]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def run_json(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
    return json.loads(result.stdout)


@pytest.mark.parametrize("which", ["flat", "wrapper"])
def test_corpus_to_export_on_a_flat_target_and_on_a_wrapper(
    which: str, tiny_target_dir: Path, tiny_hybrid_dir: Path, chat_corpus: Path, tmp_path: Path
) -> None:
    target = tiny_target_dir if which == "flat" else tiny_hybrid_dir
    cache, out, exported = tmp_path / "my cache", tmp_path / "run", tmp_path / "export"
    extracted = run_json("extract", "--corpus", chat_corpus, "--target", target, "--out", cache, "--shard-tokens", 1500)
    assert {
        *("cache", "rows", "tokens", "resumed_rows", "skipped", "seconds", "tokens_per_second"),
        *("state_bytes", "raw_state_bytes", "identity", "fingerprint"),
    } <= set(extracted)
    assert extracted["rows"] == 37
    trained = run_json("train", "--cache", cache, "--out", out, "--steps", 6, *SETS)
    keys = {"run", "steps", "final_loss", "seconds", "step_seconds", "data_wait_seconds", "peak_bytes"}
    assert keys <= set(trained)
    assert trained["cache_fingerprint"] == extracted["fingerprint"]
    figures = run_json("evaluate", "--drafter", out, "--cache", cache)
    assert {
        *("rows", "verifications", "tokens", "tau", "per_slot_accuracy", "acceptance_rate", "on_policy_share"),
        "baselines",
    } <= set(figures)
    assert set(figures["tau"]) == {"micro", "macro", "ci95"}
    assert len(figures["per_slot_accuracy"]) == len(figures["acceptance_rate"]) == 7
    assert figures["split"] == "heldout"
    assert figures["estimate"] is True  # random words are not what T would write
    written = run_json("export", "--run", out, "--out", exported)
    assert {"out", "tensors", "bytes"} <= set(written)
    assert written["tensors"] == 3 + 11 * 2
    assert sorted(path.name for path in exported.iterdir()) == ["config.json", "model.safetensors"]
    assert run_json("evaluate", "--drafter", exported, "--cache", cache)["tau"] == figures["tau"]
    assert run_json("cache", "verify", cache)["ok"] is True
    assert run_json("cache", "info", cache)["fingerprint"] == extracted["fingerprint"]
    assert run_json("cache", "diff", cache, cache)["rows"] == 37


def test_evaluate_says_estimate_wherever_it_prints_an_off_policy_tau(tiny_cache: Path, tmp_path: Path) -> None:
    run_json("train", "--cache", tiny_cache, "--out", tmp_path / "run", "--steps", 2, *SETS)
    printed = run("evaluate", "--drafter", tmp_path / "run", "--cache", tiny_cache).stdout
    taus = [line for line in printed.splitlines() if line.startswith("│") and ("drafter" in line or "ngram" in line)]
    assert len(taus) == 5
    assert all("estimate" in line for line in taus)


def test_print_config_shows_every_key_and_with_a_cache_every_resolved_value(tiny_cache: Path) -> None:
    bare = json.loads(run("train", "--print-config").stdout)
    assert bare["lr"] is None
    resolved = json.loads(run("train", "--print-config", "--cache", tiny_cache, "--steps", 50).stdout)
    assert (resolved["lr"], resolved["warmup_steps"], resolved["drafter"]["block_size"]) == (2e-3, 2, 8)
    assert resolved["recipe"] == {**bare, "steps": 50}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--cache", "{cache}", "--out", "{out}", "--set", "gama=1"], "did you mean gamma"),
        (["train", "--cache", "{corpus}", "--out", "{out}"], "{corpus}"),
        (["evaluate", "--drafter", "{cache}", "--cache", "{cache}"], "holds no drafter"),
        (["export", "--run", "{cache}", "--out", "{out}"], "holds no drafter"),
        (["extract", "--corpus", "{corpus}", "--target", "{cache}", "--out", "{out}"], "{cache}"),
        (["extract", "--corpus", "{corpus}", "--target", "{target}", "--out", "{out}", "--layers", "1,9"], "9"),
        (["extract", "--corpus", "{corpus}", "--target", "{target}", "--out", "{out}", "--codec", "q9"], "lossless"),
        (["cache", "verify", "{target}"], "{target}"),
        (["cache", "verify", "{corpus}"], "{corpus}: this is a file, and a cache is a folder"),
        (["cache", "info", "{corpus}"], "{corpus}: this is a file, and a cache is a folder"),
        (["cache", "repair", "{target}"], "{target}"),
        (["cache", "repair", "{corpus}"], "{corpus}: this is a file, and a cache is a folder"),
        (
            ["train", "--cache", "{cache}", "--out", "{out}", "--set", "block_size=1000"],
            "block_size = 1000: no training row fills even half a block",
        ),
        (["train", "--cache", "{cache}", "--out", "{out}", "--device", "foo"], "--device foo: expected auto, cpu"),
        (["cache", "diff", "{cache}", "{target}"], "{target}"),
        (["train", "--cache", "{cache}", "--out", "{corpus}/run", "--steps", "1"], "{corpus}"),
        (["train", "--cache", "{cache}", "--out", "{out}", "--steps", "1", "--set", "epochs=3"], "has no effect"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_1(
    arguments: list[str], message: str, tiny_cache: Path, tiny_target_dir: Path, chat_corpus: Path, tmp_path: Path
) -> None:
    places = {"cache": tiny_cache, "target": tiny_target_dir, "corpus": chat_corpus, "out": tmp_path / "out"}
    result = run(*[argument.format(**places) for argument in arguments])
    assert result.exit_code == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("dflash: ")]
    assert len(lines) == 1
    assert message.format(**places) in lines[0]
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left on device", "run/metrics.jsonl"), "run/metrics.jsonl: No space left on device"),
        (SafetensorError("I/O error: No space left on device"), "I/O error: No space left on device"),
    ],
)
def test_an_error_of_the_disk_is_one_line(
    error: Exception, line: str, tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("dflash_pipeline.train.loop.run_train", fail)
    result = run("train", "--cache", tiny_cache, "--out", tmp_path / "run")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, f"dflash: {line}")


def test_a_repair_that_leaves_a_damaged_cache_exits_with_1(tiny_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_pipeline.extract.repair.run_repair", lambda *_: {"ok": False})
    result = run("cache", "repair", tiny_cache)
    assert (result.exit_code, result.stdout) == (1, "ok: False\n")


def test_a_missing_option_is_a_usage_error_with_exit_code_2() -> None:
    assert run("train").exit_code == 2
    assert run("extract").exit_code == 2


def test_options_of_the_other_way_to_evaluate_are_a_usage_error(
    tiny_cache: Path, tiny_target_dir: Path, chat_corpus: Path
) -> None:
    live = ["--drafter", tiny_cache, "--target", tiny_target_dir, "--prompts", chat_corpus]
    for arguments, message in [
        ([*live, "--split", "all"], "--split: not for live evaluation"),
        (["--drafter", tiny_cache, "--cache", tiny_cache, "--rows", 3], "--rows: not for offline evaluation"),
        (["--drafter", tiny_cache, "--cache", tiny_cache, "--temperature", 0], "--temperature: not for offline"),
        (["--drafter", tiny_cache, "--target", tiny_target_dir], "give --cache"),
    ]:
        result = run("evaluate", *arguments)
        assert result.exit_code == 2
        assert message in result.stderr


def test_live_evaluation_and_trees_through_the_command_line(
    tiny_cache: Path, tiny_target_dir: Path, chat_corpus: Path, tmp_path: Path
) -> None:
    run_json("train", "--cache", tiny_cache, "--out", tmp_path / "run", "--steps", 2, *SETS)
    trees = ["--tree-budget", 0, "--tree-budget", 6]
    offline = run_json("evaluate", "--drafter", tmp_path / "run", "--cache", tiny_cache, *trees)
    assert offline["top_m_tau"]["1"] == offline["tau"]["micro"]
    assert list(offline["top_m_tau"].values()) == sorted(offline["top_m_tau"].values())
    assert offline["tree"]["0"]["tau"]["micro"] == 1.0
    live = ["evaluate", "--drafter", tmp_path / "run", "--target", tiny_target_dir, "--prompts", chat_corpus]
    options = ["--rows", 2, "--max-new-tokens", 12, "--save-rows", tmp_path / "rows.jsonl", *trees]
    found = run_json(*live, *options)
    assert {"lossless", "tokens_per_second", "baseline_tokens_per_second", "speedup", "acceptance_rate"} <= set(found)
    assert found["lossless"] is True
    assert found["tree"]["6"]["lossless"] is True
    saved = ["extract", "--corpus", tmp_path / "rows.jsonl", "--target", tiny_target_dir, "--out", tmp_path / "cache"]
    assert run_json(*saved)["rows"] == 2
    assert "equal" in run(*live, "--rows", 1, "--max-new-tokens", 4).stdout


@pytest.mark.parametrize("place", ["s3:/bucket/c", "s3:bucket/c", "file:c", "gs:c", "S3:/bucket", "https:/host/c"])
def test_a_mistyped_url_makes_no_folder(
    place: str, tiny_target_dir: Path, chat_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ("--corpus", chat_corpus, "--target", tiny_target_dir)
    for arguments in (["extract", *given, "--out", place], ["cache", "info", place]):
        result = run(*arguments)
        assert (result.exit_code, list(tmp_path.iterdir())) == (2, [])
        assert f"{place}: a URL is s3://bucket/prefix, " in result.stderr


def test_a_scheme_may_be_in_capitals_and_a_tilde_in_quotes(
    tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore", reason="the extra `buckets` is not installed")
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(tiny_cache, tmp_path / "here")
    assert run_json("cache", "publish", "~/here", f"FILE://{tmp_path}/there")["url"] == f"file://{tmp_path}/there"
    there = run_json("cache", "info", f"File://{tmp_path}/there")
    assert there["fingerprint"] == run_json("cache", "info", "~/here")["fingerprint"]


def test_a_folder_is_no_place_to_publish_at(tiny_cache: Path, tmp_path: Path) -> None:
    result = run("cache", "publish", tiny_cache, tmp_path / "there")
    assert result.exit_code == 1
    assert f"{tmp_path}/there: a cache is published under a URL: s3://" in result.stderr


def test_the_help_of_extract_shows_the_defaults_that_hold() -> None:
    from dflash_pipeline.extract import ExtractConfig
    from dflash_pipeline.store.codecs import CODECS

    shown = " ".join(run("extract", "--help").stdout.split())
    for name in ("batch_tokens", "shard_tokens", "top_k"):
        option = shown.partition(f"--{name.replace('_', '-')} ")[2].partition(" --")[0]
        assert f"[default: {getattr(ExtractConfig, name)}]" in option
    assert all(codec in shown.partition("--codec ")[2].partition(" --")[0] for codec in CODECS)


def test_dry_run_prints_the_estimate_and_writes_nothing(
    tiny_target_dir: Path, chat_corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "cache"
    found = run_json("extract", "--corpus", chat_corpus, "--target", tiny_target_dir, "--out", out, "--dry-run")
    assert {"rows", "tokens", "estimated_bytes", "free_bytes"} <= set(found)
    assert not out.exists()


def test_a_damaged_cache_stops_training_and_is_repaired(
    tiny_cache: Path, tiny_target_dir: Path, chat_corpus: Path, tmp_path: Path
) -> None:
    cache = Path(shutil.copytree(tiny_cache, tmp_path / "cache"))
    fingerprint = run_json("cache", "info", cache)["fingerprint"]
    flipped = bytearray((cache / "shards/00001/states/1/c/0/0").read_bytes())
    flipped[len(flipped) // 2] ^= 1
    faults: dict[str, Callable[[Path], object]] = {
        "states/1/c/0/0": lambda path: path.write_bytes(flipped),
        "tokens/c/0": lambda path: path.unlink(),
    }
    for name, damage in faults.items():
        damage(cache / "shards/00001" / name)
        stopped = run("train", "--cache", cache, "--out", tmp_path / "run", "--steps", 3, *SETS)
        assert stopped.exit_code == 1
        assert f"shards/00001/{name}" in stopped.stderr.splitlines()[-1]
        assert "dflash cache repair" in stopped.stderr
        checked = run("cache", "verify", cache, "--json")
        assert checked.exit_code == 1
        assert json.loads(checked.stdout)["bad_shards"] == [1]
        given = ("--corpus", chat_corpus, "--target", tiny_target_dir, "--device", "cpu")
        repaired = run_json("cache", "repair", cache, *given)
        assert (repaired["repaired_shards"], repaired["ok"]) == ([1], True)
        assert repaired["fingerprint"] == fingerprint
    assert run("train", "--cache", cache, "--out", tmp_path / "run", "--steps", 3, *SETS).exit_code == 0


TRAIN_UNDER_TRACE = """
import os, sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
from dflash_pipeline.cli import main
try:
    main(["train", "--cache", sys.argv[1], "--out", sys.argv[2], "--steps", "2", *sys.argv[4:]])
except SystemExit as end:
    assert end.code in (0, None), end.code
assert any(sys.argv[1] in path for path in opened)
assert not [path for path in opened if sys.argv[3] in path], "the target was opened"
assert "transformers" not in sys.modules
"""


def test_training_opens_no_file_of_the_target_and_does_not_import_transformers(
    tiny_cache: Path, tiny_target_dir: Path, tmp_path: Path
) -> None:
    arguments = [str(tiny_cache), str(tmp_path / "run"), str(tiny_target_dir), *SETS]
    subprocess.run([sys.executable, "-c", TRAIN_UNDER_TRACE, *arguments], check=True, capture_output=True)
