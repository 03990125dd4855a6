"""The figures of one evaluation for people, as tables; scripts take the JSON object instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def render_evaluation(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Print what `run_evaluate` returned, to stdout by default.

    Where the rows are not the target's own choice, no tau is printed without the word "estimate".
    """
    console = console or Console(highlight=False)
    console.print(_tau_table(result))
    console.print(_slot_table(result))
    for line in _notes(result):
        console.print(line, markup=False)


def _tau_table(result: Mapping[str, Any]) -> Table:
    tau, kind = result["tau"], " (estimate)" if result["estimate"] else ""
    low, high = tau["ci95"]
    between = f"{low:.3f} to {high:.3f}" if result["rows"] > 1 else "one row: no interval"
    table = Table("tau" + kind, "micro", "95% of row resamples", "macro", title=_title(result), title_justify="left")
    table.add_row("drafter" + kind, f"{tau['micro']:.3f}", between, f"{tau['macro']:.3f}")
    for name, value in result["baselines"].items():
        table.add_row(f"free {name.replace('_', ' ')}" + kind, f"{value:.3f}", "", "")
    return table


def _title(result: Mapping[str, Any]) -> str:
    return (
        f"{result['rows']:,} rows ({result['split']}), {result['tokens']:,} tokens, "
        f"{result['verifications']:,} verifications, block {result['block_size']}"
    )


def _slot_table(result: Mapping[str, Any]) -> Table:
    table = Table("slot", "right at every anchor", "accepted in the walk")
    pairs = zip(result["per_slot_accuracy"], result["acceptance_rate"], strict=True)
    for slot, (accuracy, rate) in enumerate(pairs, start=1):
        table.add_row(str(slot), "no such slot" if accuracy is None else f"{accuracy:.1%}", f"{rate:.1%}")
    return table


def _notes(result: Mapping[str, Any]) -> list[str]:
    notes = [
        "micro: all tokens / all verifications; macro: mean of the rows' own means",
        f"on-policy share {result['on_policy_share']:.4f}: tokens equal to the target's own choice",
    ]
    if result["estimate"]:
        notes.append(
            "estimate: too many tokens are not what this target would write, so decoding will differ; "
            "evaluate on completions of the target itself"
        )
    notes += [f"{label}: {result[key]}" for key, label in _WARNINGS.items() if result.get(key)]
    best = max(result["baselines"].values(), default=None)
    if best is not None and result["tau"]["micro"] <= best:
        kind = " (estimates)" if result["estimate"] else ""
        notes.append(f"the drafter does not beat a free n-gram{kind}: it is not yet worth serving")
    notes.append(f"cache {result['cache_fingerprint']}; drafter trained on {result['drafter_cache_fingerprint']}")
    return notes


_WARNINGS = {"baselines_note": "free n-gram", "skipped_rows": "rows without an anchor, left out"}
