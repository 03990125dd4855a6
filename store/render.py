"""What `dflash cache` shows to people: tables on stdout."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ..errors import counted

UNITS = ("bytes", "KB", "MB", "GB", "TB", "PB")
SHOWN_PROBLEMS = 20


def size(num_bytes: float) -> str:
    """Return a size in decimal units, three digits or so."""
    unit = 0
    while num_bytes >= 1000 and unit < len(UNITS) - 1:
        num_bytes, unit = num_bytes / 1000, unit + 1
    return f"{num_bytes:,.0f} {UNITS[unit]}" if unit == 0 else f"{num_bytes:,.2f} {UNITS[unit]}"


def render_description(info: dict[str, Any]) -> None:
    """Print what `describe` returns."""
    inputs, console = info["inputs"], _console()
    per_million = info["bytes"] / max(info["tokens"], 1) * 10**6
    target = f"{inputs['target_name']} ({inputs['dtype']}, {inputs['attention']})"
    lines = {
        "cache": info["cache"],
        "target": target,
        "corpus": ", ".join(file["name"] for file in inputs["corpus"]),
        "rows": f"{info['rows']:,} in {counted(info['shards'], 'shard')}",
        "tokens": f"{info['tokens']:,}",
        "size": f"{size(info['bytes'])}, {size(per_million)} per million tokens",
        "states": f"{size(info['state_bytes'])}, {info['bits_per_value']:.2f} bits per value, "
        f"{info['ratio']:.3f} of {size(info['raw_state_bytes'])} raw ({inputs['codec']})",
        "layers": f"{', '.join(map(str, inputs['layer_ids']))}; hidden size {info['hidden_size']:,}"
        + ("; final state" if inputs["keep_final"] else ""),
        "top tokens": f"{inputs['top_k']} of {info['vocab_size']:,}",
        "skipped": _counts(info["skipped"]),
        "dropped": _counts(info["dropped"]),
        "identity": info["identity"],
        "fingerprint": info["fingerprint"],
    }
    if info.get("parents"):
        lines["repaired from"] = ", ".join(info["parents"])
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in lines.items():
        table.add_row(key, value)
    console.print(table)
    layers = Table(title="states by layer", title_justify="left")
    for name in ("layer", "mean", "rms", "zeros", "nan", "inf"):
        layers.add_column(name, justify="right")
    for layer, stats in info["layers"].items():
        zeros = f"{stats['zeros'] / max(stats['values'], 1):.3%}"
        mean, rms = f"{stats['mean']:.4g}", f"{stats['rms']:.4g}"
        layers.add_row(layer, mean, rms, zeros, f"{stats['nans']:,}", f"{stats['infs']:,}")
    console.print(layers)


def render_verification(found: dict[str, Any]) -> None:
    """Print what `verify` returns."""
    console = _console()
    if found["ok"]:
        console.print(f"all {counted(found['files'], 'file')} ({size(found['bytes'])}) are what the manifest says")
        return
    for problem in found["problems"][:SHOWN_PROBLEMS]:
        console.print(problem)
    if len(found["problems"]) > SHOWN_PROBLEMS:
        console.print(f"... and {len(found['problems']) - SHOWN_PROBLEMS} more")
    shards = ", ".join(map(str, found["bad_shards"])) or "none"
    console.print(
        f"bad shards: {shards}; other bad files: {', '.join(found['bad_files']) or 'none'}. "
        "`dflash cache repair CACHE --corpus F --target M` makes them again"
    )


def render_difference(found: dict[str, Any]) -> None:
    """Print what `diff_caches` returns."""
    console = _console()
    console.print(f"{counted(found['rows'], 'row')} in both, {counted(found['tokens'], 'token')}")
    for key, text in (("only_a", "only in A"), ("only_b", "only in B"), ("other_tokens", "with other tokens in B")):
        if found[key]:
            console.print(f"{counted(found[key], 'row')} {text}: not compared")
    table = Table()
    for name in ("layer", "mean cosine", "least cosine", "max error", "rms error / rms", "bit-equal", "not finite"):
        table.add_column(name, justify="right")
    for layer, stats in found["layers"].items():
        table.add_row(
            layer,
            f"{stats['mean_cosine']:.6f}",
            f"{stats['min_cosine']:.6f}",
            f"{stats['max_error']:.4g}",
            f"{stats['relative_error']:.3g}",
            f"{stats['bit_equal']:.3%}",
            f"{stats['nonfinite_tokens']:,}",
        )
    console.print(table)
    console.print(f"first choice of the target equal: {found['top1_equal']:.3%}")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items()) or "none"


def _console() -> Console:
    return Console(soft_wrap=True, highlight=False, markup=False)
