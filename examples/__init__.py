"""Examples that come with the package: a small chat model of our own, a corpus it wrote, and how both were made.

`embedded/` holds what `dflash demo` runs on; README.md says how it was made and what it measures.
"""

from __future__ import annotations

from pathlib import Path

_EMBEDDED = Path(__file__).resolve().parent / "embedded"


def embedded_target() -> Path:
    """Return the folder of the embedded target, an ordinary Hugging Face model folder."""
    return _EMBEDDED / "target"


def embedded_corpus() -> Path:
    """Return the JSONL file of the embedded target's own greedy replies."""
    return _EMBEDDED / "corpus.jsonl"
