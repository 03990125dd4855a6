"""From a corpus to a cache: rows, plan, forwards of the target, shards."""

from __future__ import annotations

from .config import ExtractConfig
from .progress import Progress, RichProgress, SilentProgress
from .run import run_extract

__all__ = ["ExtractConfig", "Progress", "RichProgress", "SilentProgress", "run_extract"]
