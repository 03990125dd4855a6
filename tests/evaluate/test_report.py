"""The page holds every figure, fetches nothing, and takes nothing of the result as markup."""

from __future__ import annotations

import base64
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from dflash_pipeline.drafter.walk import RowWalk, acceptance_rates
from dflash_pipeline.errors import ConfigError
from dflash_pipeline.evaluate.offline import EvaluateConfig, run_evaluate
from dflash_pipeline.evaluate.report import check_report, render_report, training_curve
from dflash_pipeline.train.loop import TrainOptions, run_train
from dflash_pipeline.train.recipes import load_recipe

pytest.importorskip("matplotlib")

TAU = {"micro": 2.5, "macro": 2.43, "ci95": [2.2, 2.8]}
RESULT: dict[str, Any] = {
    "drafter": "run/drafter",
    "cache": "cache",
    "rows": 12,
    "split": "heldout",
    "tokens": 2500,
    "verifications": 1000,
    "block_size": 4,
    "tau": TAU,
    "per_slot_accuracy": [0.9, 0.5, None],
    "acceptance_rate": [0.8, 0.5, 0.2],
    "on_policy_share": 0.99,
    "estimate": False,
    "baselines": {"ngram_4": 1.75, "prompt_lookup": 1.25},
    "baselines_note": "fitted on 200 rows",
    "cache_fingerprint": "abc",
    "drafter_cache_fingerprint": None,
    "sources": {"gsm8k": {"rows": 7, "tau": TAU}, "<b>mbpp</b>": {"rows": 5, "tau": TAU}},
    "top_m_tau": {"1": 2.5, "2": 3.0},
    "tree": {"8": {"tau": TAU}},
    "against": {
        **{"drafter": "other", "block_size": 8, "context_layer_ids": [1, 4], "tau": 2.0, "macro_tau": 2.0, "rows": 12},
        **{"difference": 0.5, "ci95": [0.3, 0.7], "per_slot_accuracy": [0.8, None], "slot_difference": [0.1]},
        "anchors": 2400,
    },
    "context_zeroed_tau": 1.06,
    "diagnosis": {
        "accepted_histogram": [200, 300, 300, 200],
        "context_layers": [{"layer_id": 4, "rms": 0.1, "output_share": 0.75}],
        "checks": {"ok": True},
        "divergence_share": 0.01,
        "rejected_diverged_share": 0.1,
    },
    "samples": [{"row": "a", "source": "s", "tau": 2.0, "pieces": [["x <script>", False], ["alert(1)", True]]}],
}
CURVE = [{"step": n, "loss": 5 - n / 10, **({"heldout_tau": 1 + n / 20} if n % 5 == 0 else {})} for n in range(1, 21)]


class Page(HTMLParser):
    """Collects the tags, their addresses and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.words = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]

    def handle_data(self, data: str) -> None:
        self.words += data


def pictures(page: Page) -> list[str]:
    """Return the SVG of every figure, checked to be whole."""
    found = []
    for address in page.addresses:
        assert address.startswith("data:image/svg+xml;base64,")
        text = base64.b64decode(address.split(",", 1)[1]).decode()
        ElementTree.fromstring(text)
        assert not re.findall(r'(?:href|src)="(?!#)[^"]*"', text)  # nothing outside itself
        found.append(text)
    return found


def test_the_page_holds_the_figures_and_fetches_nothing() -> None:
    text = render_report(RESULT, CURVE)
    page = Page(text)
    assert len(pictures(page)) == 6  # tau, difference, slots, histogram, choices, training
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    for part in ("tau 2.500", "2.200 to 2.800", "+0.500 tau", "+0.300 to +0.700", "1.060", "75.0%", "abc", "12 rows"):
        assert part in page.words
    assert "estimate" not in page.words
    assert render_report(RESULT, CURVE) == text  # the same result gives the same page


def test_parts_that_were_not_asked_for_are_not_there() -> None:
    extra = ("sources", "top_m_tau", "tree", "against", "context_zeroed_tau", "diagnosis", "samples")
    page = Page(render_report({key: value for key, value in RESULT.items() if key not in extra}, []))
    assert len(pictures(page)) == 3
    assert "mark" not in page.tags


def test_text_of_rows_and_names_is_never_markup() -> None:
    page = Page(render_report(RESULT, []))
    assert {"script", "b"}.isdisjoint(page.tags)
    assert "x <script>alert(1)" in page.words
    assert page.tags.count("mark") == 1


def test_every_tau_of_an_estimate_is_called_one() -> None:
    page = Page(render_report({**RESULT, "estimate": True, "on_policy_share": 0.5}, CURVE))
    lines = [line for line in page.words.splitlines() if re.search(r"tau [+\d]", line)]
    assert len(lines) >= 2
    assert all("estimate" in line for line in lines)


def test_the_histogram_is_that_of_the_walks() -> None:
    from dflash_pipeline.evaluate.plots import accepted_counts

    walks = [RowWalk([0] * 7, [0, 3, 3, 1, 0, 2, 3], [1] * 7), RowWalk([0] * 3, [1, 1, 0], [1] * 3)]
    assert accepted_counts(acceptance_rates(walks, 4), 10) == [3, 3, 1, 3]


def test_the_curve_is_that_of_the_run_around_the_drafter(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step-5").mkdir(parents=True)
    lines = [{"step": 1, "loss": 4.0}, {"step": 2, "loss": 3.0, "heldout": {"tau": {"micro": 1.5, "macro": 1.7}}}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo')
    for place in (run, run / "drafter", run / "checkpoints" / "step-5"):
        assert training_curve(place) == [lines[0], {"step": 2, "loss": 3.0, "heldout_tau": 1.5}]
    assert training_curve(tmp_path / "a" / "b" / "c") == []


def test_a_report_that_cannot_be_made_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="a folder that exists"):
        check_report(tmp_path / "none" / "out.html")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'dflash-pipeline\[report\]'"):
        check_report(tmp_path / "out.html")


def test_an_evaluation_of_a_run_writes_its_report_with_the_curve(tmp_path: Path, tiny_cache: Path) -> None:
    """The run's own metrics, as training writes them."""
    recipe = load_recipe(
        "default", ["num_layers=1", "steps=4", "eval_every=2", "heldout_share=0.2", "anchors_per_pack=8"]
    )
    run, out = tmp_path / "run", tmp_path / "out.html"
    run_train(TrainOptions(cache=tiny_cache, out=run, recipe=recipe, device="cpu"), lambda _: None)
    assert [point["step"] for point in training_curve(run) if "heldout_tau" in point] == [2, 4]
    result = run_evaluate(EvaluateConfig(drafter=run, cache=tiny_cache, report=out, device="cpu"), lambda _: None)
    page = Page(out.read_text())
    assert f"tau {result['tau']['micro']:.3f}" in page.words
    assert "training" in page.words
