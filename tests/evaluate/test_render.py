"""People read tau with its kind, and never without the word estimate where it is one."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from dflash_pipeline.evaluate.render import render_evaluation
from dflash_pipeline.evaluate.render_live import render_live

RESULT = {
    "rows": 12,
    "split": "heldout",
    "tokens": 2500,
    "verifications": 1000,
    "block_size": 4,
    "tau": {"micro": 2.5, "macro": 2.4321, "ci95": [2.2, 2.8]},
    "per_slot_accuracy": [0.9, 0.5, None],
    "acceptance_rate": [0.8, 0.5, 0.2],
    "on_policy_share": 0.99,
    "estimate": False,
    "baselines": {"ngram_1": 1.25, "ngram_2": 1.75},
    "baselines_note": "fitted on 200 rows",
    "cache_fingerprint": "abc",
    "drafter_cache_fingerprint": None,
}


def rendered(**changes: object) -> str:
    stream = io.StringIO()
    render_evaluation({**RESULT, **changes}, Console(file=stream, width=120))
    return stream.getvalue()


def test_micro_and_macro_are_named_and_the_free_n_gram_stands_beside() -> None:
    text = rendered()
    for part in ("micro", "macro", "2.500", "2.432", "2.200 to 2.800", "1.250", "1.750", "12 rows (heldout)", "0.9900"):
        assert part in text
    assert "estimate" not in text
    assert "not yet worth serving" not in text


@pytest.mark.parametrize("best", [1.75, 3.0])
def test_no_line_with_a_tau_lacks_the_word_estimate(best: float) -> None:
    text = rendered(estimate=True, on_policy_share=0.5, baselines={"ngram_1": 1.25, "ngram_2": best})
    figures = [line for line in text.splitlines() if re.search(r"\d\.\d{3}(?!\d)", line)]
    assert len(figures) == 3
    assert all("estimate" in line for line in figures)


def test_a_drafter_no_better_than_the_n_gram_is_called_that() -> None:
    assert "does not beat a free n-gram" in rendered(baselines={"ngram_1": 2.5})
    assert "does not beat a free prompt lookup" in rendered(baselines={"ngram_1": 1.5, "prompt_lookup": 2.5})


def test_a_single_row_has_no_interval() -> None:
    assert "one row: no interval" in rendered(rows=1)


def test_trees_and_their_ceilings_stand_below_the_drafter_each_called_what_it_is() -> None:
    tree = {"tau": {"micro": 3.111, "macro": 3.0, "ci95": [2.9, 3.3]}}
    extra = {"tree": {"16": tree}, "top_m_tau": {"1": 2.5, "2": 3.333}}
    text = rendered(**extra)
    for part in ("tree of 16 nodes", "3.111", "2.900 to 3.300", "any tree 2 wide", "at most 3.333"):
        assert part in text
    assert "any tree 1 wide" not in text
    lines = [line for line in rendered(estimate=True, **extra).splitlines() if "3.111" in line or "3.333" in line]
    assert len(lines) == 2
    assert all("estimate" in line for line in lines)


def test_live_figures_say_how_the_text_compares_with_plain_decoding() -> None:
    figures = {"rows": 3, "tau": RESULT["tau"], "tokens_per_second": 30.0, "speedup": 1.5}
    differing = {"lossless": False, "differences": {"ties": 2, "other": 0}}
    result = {
        **(figures | differing),
        "tokens": 2500,
        "verifications": 1000,
        "block_size": 4,
        "target_dtype": "bfloat16",
        "baseline_tokens_per_second": 20.0,
        "sources": {"gsm8k": figures},
        "tree": {"16": {**figures, "lossless": True, "differences": {"ties": 0, "other": 0}}},
    }
    stream = io.StringIO()
    render_live(result, Console(file=stream, width=160))
    for part in (
        "2 rows differ from a tie on, 0 otherwise",
        "tree of 16",
        "equal",
        "1.50",
        "20.0",
        "gsm8k",
        "bfloat16",
    ):
        assert part in stream.getvalue()
