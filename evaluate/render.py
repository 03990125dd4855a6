"""The figures of one evaluation for people, as tables; scripts take the JSON object instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import counted


def render_evaluation(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Print what `run_evaluate` returned, to stdout by default.

    Where the rows are not the target's own choice, no tau is printed without the word "estimate".
    """
    console = console or Console(highlight=False)
    console.print(_tau_table(result))
    console.print(_slot_table(result))
    if "sources" in result:
        console.print(_source_table(result))
    if "diagnosis" in result:
        console.print(_layer_table(result["diagnosis"]))
    for line in _notes(result):
        console.print(line, markup=False)
    for sample in result.get("samples", []):
        console.print(_sample(sample, result["estimate"]))


def _tau_table(result: Mapping[str, Any]) -> Table:
    tau, kind = result["tau"], " (estimate)" if result["estimate"] else ""
    low, high = tau["ci95"]
    between = f"{low:.3f} to {high:.3f}" if result["rows"] > 1 else "one row: no interval"
    table = Table("tau" + kind, "micro", "95% of row resamples", "macro", title=_title(result), title_justify="left")
    table.add_row("drafter" + kind, f"{tau['micro']:.3f}", between, f"{tau['macro']:.3f}")
    if "against" in result:
        other = result["against"]
        table.add_row("against" + kind, f"{other['tau']:.3f}", "", f"{other['macro_tau']:.3f}")
    for budget, tree in result.get("tree", {}).items():
        low, high = tree["tau"]["ci95"]
        figures = (f"{tree['tau']['micro']:.3f}", f"{low:.3f} to {high:.3f}", f"{tree['tau']['macro']:.3f}")
        table.add_row(f"tree of {budget} nodes" + kind, *figures)
    for m, value in result.get("top_m_tau", {}).items():
        if m != "1":
            table.add_row(f"any tree {m} wide" + kind, f"at most {value:.3f}", "", "")
    for name, value in result["baselines"].items():
        table.add_row(f"free {name.replace('_', ' ')}" + kind, f"{value:.3f}", "", "")
    return table


def _title(result: Mapping[str, Any]) -> str:
    return (
        f"{counted(result['rows'], 'row')} ({result['split']}), {counted(result['tokens'], 'token')}, "
        f"{counted(result['verifications'], 'verification')}, block {result['block_size']}"
    )


def _slot_table(result: Mapping[str, Any]) -> Table:
    table = Table("slot", "right at every anchor", "accepted in the walk")
    pairs = zip(result["per_slot_accuracy"], result["acceptance_rate"], strict=True)
    for slot, (accuracy, rate) in enumerate(pairs, start=1):
        table.add_row(str(slot), "no such slot" if accuracy is None else f"{accuracy:.1%}", f"{rate:.1%}")
    return table


def _source_table(result: Mapping[str, Any]) -> Table:
    kind = " (estimate)" if result["estimate"] else ""
    table = Table("source", "rows", "tau micro" + kind, "95% of row resamples", "macro")
    for name, found in result["sources"].items():
        low, high = found["tau"]["ci95"]
        between = f"{low:.3f} to {high:.3f}" if found["rows"] > 1 else "one row: no interval"
        table.add_row(
            Text(name),
            f"{found['rows']:,}",
            f"{found['tau']['micro']:.3f}{kind}",
            between,
            f"{found['tau']['macro']:.3f}",
        )
    return table


def _sample(sample: Mapping[str, Any], estimate: bool) -> Text:
    """Return one reply: accepted drafts in brackets and green, the target's own tokens plain."""
    kind = " (estimate)" if estimate else ""
    text = Text(f"\n{sample['row']} ({sample['source']}): tau {sample['tau']:.3f}{kind}, accepted drafts in ⟨⟩\n")
    for piece, accepted in sample["pieces"]:
        text.append(f"⟨{piece}⟩" if accepted else piece, style="green" if accepted else "")
    return text


def _layer_table(diagnosis: Mapping[str, Any]) -> Table:
    table = Table("context layer", "RMS of its fc columns", "share of fc's output")
    for layer in diagnosis["context_layers"]:
        table.add_row(str(layer["layer_id"]), f"{layer['rms']:.2e}", f"{layer['output_share']:.1%}")
    return table


def _diagnosis_notes(result: Mapping[str, Any]) -> list[str]:
    found, kind = result["diagnosis"], " (estimate)" if result["estimate"] else ""
    checks = found["checks"]
    lines = [
        f"with the context zeroed{kind}: tau {result['context_zeroed_tau']:.3f}; the rest is what the states are worth",
        "drafts accepted -> verifications: "
        + ", ".join(f"{count} -> {times:,}" for count, times in enumerate(found["accepted_histogram"])),
        f"{found['divergence_share']:.2%} of the tokens are not the target's own choice; they make "
        f"{found['rejected_diverged_share']:.1%} of the rejections",
        f"self-checks {'passed' if checks['ok'] else 'FAILED'}: relative errors: mask against later states "
        f"{checks['mask_future_error']:.1e}, against the dense mask {checks['mask_plain_error']:.1e}, rotation "
        f"{checks['rope_error']:.1e}",
    ]
    return lines if checks["reads_context"] else [*lines, "the drafter does not read its context at all"]


def _against_note(result: Mapping[str, Any]) -> str:
    other, kind = result["against"], " (estimate)" if result["estimate"] else ""
    low, high = other["ci95"]
    verdict = "no difference can be told" if low <= 0 <= high else "better" if low > 0 else "worse"
    return (
        f"against {other['drafter']}: {other['difference']:+.3f} tau{kind} (95% of paired row resamples {low:+.3f} to "
        f"{high:+.3f}) over {other['anchors']:,} anchors of the same {counted(other['rows'], 'row')}: {verdict}"
    )


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
    notes += [_against_note(result)] if "against" in result else []
    notes += _diagnosis_notes(result) if "diagnosis" in result else []
    notes += [f"{label}: {result[key]}" for key, label in _WARNINGS.items() if result.get(key)]
    best = max(result["baselines"], key=result["baselines"].__getitem__, default=None)
    if best is not None and result["tau"]["micro"] <= result["baselines"][best]:
        kind = " (estimates)" if result["estimate"] else ""
        name = "n-gram" if best.startswith("ngram") else best.replace("_", " ")
        notes.append(f"the drafter does not beat a free {name}{kind}: it is not yet worth serving")
    notes.append(f"cache {result['cache_fingerprint']}; drafter trained on {result['drafter_cache_fingerprint']}")
    return notes


_WARNINGS = {"baselines_note": "free n-gram", "skipped_rows": "rows without an anchor, left out"}
