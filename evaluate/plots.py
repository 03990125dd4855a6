"""The figures of a report, each an SVG in a data URL: nothing is fetched when the page is opened."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

OURS, THEIRS, FREE, GRID = "#1f6f8b", "#d1495b", "#8d99ae", "#e5e7eb"
_STYLE: Any = {"font.size": 10, "svg.hashsalt": "dflash", "axes.spines.top": False, "axes.spines.right": False}


def tau_plot(result: Mapping[str, Any]) -> str:
    """Micro tau of all rows, of each source and of the other drafter, with intervals; free baselines as lines."""
    named = [("all rows", result["tau"]["micro"], result["tau"]["ci95"], OURS)]
    for name, found in result.get("sources", {}).items():
        named.append((name, found["tau"]["micro"], found["tau"]["ci95"], OURS))
    if "against" in result:
        named.append(("against", result["against"]["tau"], None, THEIRS))
    axes, figure = _axes(height=1.2 + 0.38 * len(named))
    for place, (_, tau, interval, colour) in enumerate(named):
        if interval:
            axes.plot(interval, [place, place], color=colour, linewidth=2, solid_capstyle="butt")
        axes.plot([tau], [place], "o", color=colour)
        axes.annotate(f"{tau:.2f}", (tau, place), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8)
    for name, tau in result["baselines"].items():
        if name in ("ngram_4", "prompt_lookup"):
            axes.axvline(tau, color=FREE, linestyle=":" if name == "ngram_4" else "--", label=name.replace("_", " "))
    axes.set_yticks(range(len(named)), [name for name, *_ in named])
    axes.set_ylim(len(named) - 0.4, -0.7)
    axes.set_xlim(left=min(1.0, axes.get_xlim()[0]))
    axes.set_xlabel("tau, tokens per verification" + _kind(result))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, loc="best")
    return _svg(figure)


def slot_plot(result: Mapping[str, Any]) -> str:
    """Accuracy of each slot at all anchors, and the share of verifications that accepted it."""
    axes, figure = _axes()
    _line(axes, result["per_slot_accuracy"], OURS, "o-", "right, at every anchor")
    _line(axes, result["acceptance_rate"], OURS, "s--", "accepted, in the walk")
    if "against" in result:
        _line(axes, result["against"]["per_slot_accuracy"], THEIRS, "o-", "against: right, at every anchor")
    axes.set_xlabel("slot")
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8)
    return _svg(figure)


def histogram_plot(result: Mapping[str, Any]) -> str:
    """How many drafts the verifications accepted."""
    axes, figure = _axes()
    counts = accepted_counts(result["acceptance_rate"], result["verifications"])
    axes.bar(range(len(counts)), counts, color=OURS)
    axes.set_xlabel("drafts accepted")
    axes.set_ylabel("verifications")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _svg(figure)


def accepted_counts(acceptance_rate: Sequence[float], verifications: int) -> list[int]:
    """Return the verifications that accepted exactly 0..B-1 drafts, from the shares that accepted slot 1..B-1."""
    at_least = [round(share * verifications) for share in (1.0, *acceptance_rate, 0.0)]
    return [more - fewer for more, fewer in itertools.pairwise(at_least)]


def difference_plot(result: Mapping[str, Any]) -> str:
    """The difference of the two drafters' tau with its paired interval, beside zero."""
    other = result["against"]
    axes, figure = _axes(height=1.4)
    axes.plot(other["ci95"], [0, 0], color=OURS, linewidth=2)
    axes.plot([other["difference"]], [0], "o", color=OURS)
    axes.axvline(0, color="black", linewidth=1)
    axes.set_yticks([])
    axes.set_ylim(-1, 1)
    axes.set_xlabel("tau less the other's, 95% of paired row resamples" + _kind(result))
    return _svg(figure)


def training_plot(curve: Sequence[Mapping[str, Any]]) -> str:
    """Loss of every step, smoothed, and the held-out tau that training measured on the way."""
    axes, figure = _axes()
    steps = [point["step"] for point in curve]
    losses = [point["loss"] for point in curve]
    axes.plot(steps, smoothed(losses, max(1, len(losses) // 50)), color=FREE)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, smoothed", color=FREE)
    held = [(point["step"], point["heldout_tau"]) for point in curve if "heldout_tau" in point]
    if held:
        right = axes.twinx()
        right.plot(*zip(*held, strict=True), "o-", color=OURS)
        right.set_ylabel("held-out tau, in training", color=OURS)
        right.spines["right"].set_visible(True)
    return _svg(figure)


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """Return running means over up to `width` values before and at each place."""
    return [sum(part) / len(part) for end in range(1, len(values) + 1) for part in [values[max(0, end - width) : end]]]


def choices_plot(result: Mapping[str, Any]) -> str:
    """What more than one choice per slot would earn: top-m, and trees by budget."""
    axes, figure = _axes()
    top = {int(m): tau for m, tau in result.get("top_m_tau", {}).items()}
    trees = {int(budget): found["tau"]["micro"] for budget, found in result.get("tree", {}).items()}
    for found, style, label in ((top, "o-", "among the m first choices"), (trees, "s-", "tree of so many nodes")):
        if found:
            axes.plot(sorted(found), [found[key] for key in sorted(found)], style, color=OURS, label=label)
    axes.set_xscale("symlog", base=2)
    ticks = sorted({*top, *trees})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("m, or nodes")
    axes.set_ylabel("tau" + _kind(result))
    axes.legend(frameon=False, fontsize=8)
    return _svg(figure)


def _line(axes: Axes, values: Sequence[float | None], colour: str, style: str, label: str) -> None:
    points = [(slot, value) for slot, value in enumerate(values, 1) if value is not None]
    axes.plot([slot for slot, _ in points], [value for _, value in points], style, color=colour, label=label)


def _axes(height: float = 3.2) -> tuple[Axes, Figure]:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(6.4, height), layout="constrained")
        axes = figure.add_subplot()
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    return axes, figure


def _svg(figure: Figure) -> str:
    stream = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(stream.getvalue()).decode()


def _kind(result: Mapping[str, Any]) -> str:
    return " (estimate)" if result["estimate"] else ""
