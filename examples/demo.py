"""`dflash demo`: the whole path on the embedded tiny target, from its corpus to an exported drafter."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import counted
from ..evaluate.export import ExportConfig, run_export
from ..evaluate.offline import EvaluateConfig, run_evaluate
from ..extract.config import ExtractConfig
from ..extract.progress import RichProgress
from ..extract.run import run_extract
from ..train.loop import TrainOptions, run_train
from ..train.recipes import load_recipe
from . import embedded_corpus, embedded_target

RECIPE = ("num_layers=2", "steps=1000", "anchors_per_pack=128", "eval_every=250", "eval_rows=16")
"""What the demo sets over the recipe `default`: a small drafter for a small target."""


def run_demo(out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Extract, train, evaluate and export on the embedded target; run again, it goes on where it stopped.

    Args:
        out: folder for the cache, the run, the export and summary.json.
        say: takes lines for people.

    Returns:
        What summary.json holds: tau, ngram_tau, seconds, the figures of every stage and where they lie.

    Raises:
        DflashError: a stage refused its input, such as a folder of other settings.
    """
    started = time.perf_counter()
    cache, run, exported = out / "cache", out / "run", out / "export"
    say(f"1/4 extract: the target runs once over its corpus and its states go to {cache}")
    config = ExtractConfig(corpus=(embedded_corpus(),), target=str(embedded_target()), out=cache, device="cpu")
    extraction = run_extract(config, RichProgress())
    say(f"2/4 train: the drafter learns from {cache}; the target is not loaded")
    options = TrainOptions(cache=cache, out=run, recipe=load_recipe("default", RECIPE), device="cpu")
    training = run_train(options, say)
    assert training is not None  # one process
    say("3/4 evaluate: how many tokens a verification would yield, on rows the drafter has not seen")
    evaluation = run_evaluate(EvaluateConfig(drafter=run, cache=cache, device="cpu"), say)
    say(f"4/4 export: the weights alone, as vLLM, SGLang and z-lab's code load them, to {exported}")
    export = run_export(ExportConfig(run=run, out=exported))
    baselines = evaluation["baselines"]
    summary = {
        "tau": evaluation["tau"]["micro"],
        "tau_ci95": evaluation["tau"]["ci95"],
        "tau_macro": evaluation["tau"]["macro"],
        "ngram_tau": max(value for name, value in baselines.items() if name.startswith("ngram")),
        "seconds": time.perf_counter() - started,
        "rows": evaluation["rows"],
        "on_policy_share": evaluation["on_policy_share"],
        "tokens": extraction["tokens"],
        "state_bytes": extraction["state_bytes"],
        "raw_state_bytes": extraction["raw_state_bytes"],
        "train_seconds": training["seconds"],
        "cache": str(cache),
        "run": str(run),
        "export": export["out"],
        "cache_fingerprint": extraction["fingerprint"],
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    for line in _closing_lines(summary):
        say(line)
    return summary


def _closing_lines(summary: dict[str, Any]) -> list[str]:
    low, high = summary["tau_ci95"]
    out = Path(summary["cache"]).parent
    return [
        "",
        f"tau {summary['tau']:.2f} tokens per verification on {counted(summary['rows'], 'held-out row')} "
        f"(95% interval {low:.2f} to {high:.2f}); a free n-gram earns {summary['ngram_tau']:.2f}",
        f"cache: {summary['cache']}, {summary['tokens']:,} tokens, "
        f"{summary['state_bytes'] / summary['raw_state_bytes']:.2f} of the raw states' size",
        f"run: {summary['run']} (config.json, metrics.jsonl, drafter/)",
        f"export: {summary['export']}; all figures: {out / 'summary.json'}; {summary['seconds']:.0f} s in all",
        "",
        "Try next:",
        f"  dflash evaluate --drafter {summary['run']} --cache {summary['cache']}",
        f"  dflash train --cache {summary['cache']} --out {out / 'ablation'} --recipe bug-shortcut "
        + " ".join(f"--set {setting}" for setting in RECIPE),
        f"  dflash cache info {summary['cache']}",
    ]
