"""One page that shows an evaluation: self-contained HTML, without scripts, to keep and to send."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..errors import ConfigError, counted
from ..store.durable import write_atomic

METRICS = "metrics.jsonl"
_MOST_POINTS = 2_000_000


def check_report(path: Path) -> None:
    """Check before anything is measured that a report can be made and written.

    Raises:
        ConfigError: matplotlib is not installed, or the folder is not there.
    """
    try:
        import matplotlib  # noqa: F401, PLC0415 - an extra
    except ImportError:
        raise ConfigError("--report needs matplotlib: pip install 'dflash-pipeline[report]'") from None
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--report {path}: expected a file name in a folder that exists")


def training_curve(drafter: Path) -> list[dict[str, Any]]:
    """Return the steps of the run in whose folder a drafter lies: step, loss and, where it was measured, heldout_tau.

    Empty where it lies in none. A line that a crash cut short, or that is no step, is left out.
    """
    for folder in (drafter, drafter.parent, drafter.parent.parent):
        path = folder / METRICS
        if path.is_file():
            with path.open(encoding="utf-8", errors="replace") as file:
                points = [_point(line) for line, _ in zip(file, range(_MOST_POINTS), strict=False)]
            return [point for point in points if point]
    return []


def write_report(path: Path, result: Mapping[str, Any], curve: Sequence[Mapping[str, Any]]) -> None:
    """Write the page of what `run_evaluate` returned, and of the training curve where there is one."""
    write_atomic(path, render_report(result, curve).encode())


def render_report(result: Mapping[str, Any], curve: Sequence[Mapping[str, Any]]) -> str:
    """Return the page as HTML. Nothing of the result is taken as markup."""
    from . import plots  # noqa: PLC0415 - matplotlib is an extra

    kind = " (estimate)" if result["estimate"] else ""
    low, high = result["tau"]["ci95"]
    parts = [
        f"<h1>tau {result['tau']['micro']:.3f}{kind}</h1>",
        f"<p>95% of row resamples {low:.3f} to {high:.3f}; macro {result['tau']['macro']:.3f}{kind}; "
        f"{counted(result['rows'], 'row')} ({escape(result['split'])}), "
        f"{counted(result['verifications'], 'verification')}, "
        f"block {result['block_size']}</p>",
        _notice(result),
        _figure("tau by source", plots.tau_plot(result)),
    ]
    if "against" in result:
        parts += [_against(result, kind), _figure("difference", plots.difference_plot(result))]
    parts += [
        _figure("accuracy and acceptance by slot", plots.slot_plot(result)),
        _figure("accepted drafts of a verification", plots.histogram_plot(result)),
    ]
    if result.get("top_m_tau") or result.get("tree"):
        parts.append(_figure("more than one choice", plots.choices_plot(result)))
    if curve:
        parts.append(_figure("training", plots.training_plot(curve)))
    if "diagnosis" in result:
        parts.append(_diagnosis(result, kind))
    parts += [_sample(sample, kind) for sample in result.get("samples", [])]
    parts.append(_table("what was evaluated", _provenance(result)))
    return _PAGE.format(title=escape(f"dflash: {result['drafter']}"), style=_STYLE, body="\n".join(filter(None, parts)))


def _notice(result: Mapping[str, Any]) -> str:
    if not result["estimate"]:
        return ""
    return (
        f'<p class="notice">An estimate: only {result["on_policy_share"]:.1%} of the tokens are what this target would '
        "write, so decoding will differ.</p>"
    )


def _against(result: Mapping[str, Any], kind: str) -> str:
    other = result["against"]
    low, high = other["ci95"]
    return (
        f"<h2>against {escape(other['drafter'])}</h2><p>{other['difference']:+.3f} tau{kind} "
        f"({low:+.3f} to {high:+.3f}) on the same {counted(other['rows'], 'row')} and {other['anchors']:,} anchors; "
        f"the other: {other['tau']:.3f}{kind}, block {other['block_size']}, context layers "
        f"{escape(str(other['context_layer_ids']))}</p>"
    )


def _diagnosis(result: Mapping[str, Any], kind: str) -> str:
    found = result["diagnosis"]
    rows = {f"tau with the context zeroed{kind}": f"{result['context_zeroed_tau']:.3f}"}
    for layer in found["context_layers"]:
        rows[f"layer {layer['layer_id']}: share of fc's output"] = f"{layer['output_share']:.1%}"
    rows["tokens that are not the target's choice"] = f"{found['divergence_share']:.2%}"
    rows["rejections at such tokens"] = f"{found['rejected_diverged_share']:.1%}"
    rows["self-checks of mask and rotation"] = "passed" if found["checks"]["ok"] else "FAILED"
    return _table("diagnosis", rows)


def _sample(sample: Mapping[str, Any], kind: str) -> str:
    pieces = ((escape(piece), accepted) for piece, accepted in sample["pieces"])
    text = "".join(f"<mark>{piece}</mark>" if accepted else piece for piece, accepted in pieces)
    return (
        f"<h2>{escape(sample['row'])} ({escape(sample['source'])}): tau {sample['tau']:.2f}{kind}</h2>"
        f"<p>Accepted drafts are marked.</p><pre>{text}</pre>"
    )


def _provenance(result: Mapping[str, Any]) -> dict[str, str]:
    names = ("drafter", "cache", "cache_fingerprint", "drafter_cache_fingerprint", "split", "baselines_note")
    rows = {name.replace("_", " "): str(result.get(name)) for name in names}
    kind = " (estimate)" if result["estimate"] else ""
    for name, tau in result["baselines"].items():
        rows[f"free {name.replace('_', ' ')}{kind}"] = f"{tau:.3f}"
    return rows | {"on-policy share": f"{result['on_policy_share']:.4f}"}


def _table(title: str, rows: Mapping[str, str]) -> str:
    lines = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items())
    return f"<h2>{escape(title)}</h2><table>{lines}</table>"


def _figure(title: str, source: str) -> str:
    return f'<figure><figcaption>{escape(title)}</figcaption><img alt="{escape(title)}" src="{source}"></figure>'


def _point(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
        point = {"step": int(value["step"]), "loss": float(value["loss"])}
        if "heldout" in value:
            point["heldout_tau"] = float(value["heldout"]["tau"]["micro"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
    return point


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 46rem; margin: 2rem auto; padding: 0 1rem }
h1 { margin-bottom: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; overflow-wrap: anywhere }
figure { margin: 1.5rem 0 } figcaption { font-weight: 600 } img { width: 100% }
table { border-collapse: collapse } th { text-align: left; font-weight: 400; padding-right: 1.5rem }
td { overflow-wrap: anywhere; font-variant-numeric: tabular-nums } tr { border-bottom: 1px solid #e5e7eb }
pre { white-space: pre-wrap; background: #f7f8fa; padding: 1rem; overflow-wrap: anywhere }
mark { background: #bfe3d0 } .notice { background: #fdf1d6; padding: .5rem 1rem }
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>{style}</style></head><body>
{body}
</body></html>
"""
