"""The figures of a live evaluation for people, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from ..errors import counted


def render_live(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Print what `run_live` returned, to stdout by default."""
    console = console or Console(highlight=False)
    table = Table("decoding", "tau micro", "95% of row resamples", "macro", "tokens/s", "speed-up", "as plain decoding")
    named = [("drafts", result), *((f"tree of {budget}", found) for budget, found in result["tree"].items())]
    for name, found in named:
        tau = found["tau"]
        low, high = tau["ci95"]
        table.add_row(
            name,
            f"{tau['micro']:.3f}",
            f"{low:.3f} to {high:.3f}" if found["rows"] > 1 else "one row: no interval",
            f"{tau['macro']:.3f}",
            f"{found['tokens_per_second']:.1f}",
            f"{found['speedup']:.2f}",
            _equality(found),
        )
    table.add_row("plain", "1.000", "", "", f"{result['baseline_tokens_per_second']:.1f}", "1.00", "")
    table.title = (
        f"{counted(result['rows'], 'row')}, {counted(result['tokens'], 'token')}, "
        f"{counted(result['verifications'], 'verification')}, "
        f"block {result['block_size']}, {result['target_dtype']}"
    )
    console.print(table)
    sources = Table("source", "rows", "tau micro", "macro")
    for name, found in result["sources"].items():
        sources.add_row(name, f"{found['rows']:,}", f"{found['tau']['micro']:.3f}", f"{found['tau']['macro']:.3f}")
    console.print(sources)
    console.print("micro: all tokens / all verifications; macro: mean of the rows' own means", markup=False)


def _equality(found: Mapping[str, Any]) -> str:
    if found["lossless"] is None:
        return "sampled"
    counts = found["differences"]
    if found["lossless"]:
        return "equal"
    ties = "1 row differs" if counts["ties"] == 1 else f"{counts['ties']} rows differ"
    return f"{ties} from a tie on, {counts['other']} otherwise"
