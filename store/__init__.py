"""The cache on disk, format 1 (docs/format.md): plan, shards, manifest; written once, read many times.

    from dflash_pipeline.store import open_cache
    cache = open_cache("cache")
    row = cache.read_row(0)

Names are imported when first used: the plan and the manifest need neither torch nor zarr.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .head import TargetHead
    from .identity import CorpusFile, Identity
    from .integrity import describe, verify
    from .manifest import Manifest
    from .plan import Plan, assign_rows
    from .reader import CacheReader, open_cache
    from .rows import Row
    from .writer import CacheWriter

_HOMES = {
    "CacheReader": "reader",
    "CacheWriter": "writer",
    "CorpusFile": "identity",
    "Identity": "identity",
    "Manifest": "manifest",
    "Plan": "plan",
    "Row": "rows",
    "TargetHead": "head",
    "assign_rows": "plan",
    "describe": "integrity",
    "open_cache": "reader",
    "verify": "integrity",
}

__all__ = [
    "CacheReader",
    "CacheWriter",
    "CorpusFile",
    "Identity",
    "Manifest",
    "Plan",
    "Row",
    "TargetHead",
    "assign_rows",
    "describe",
    "open_cache",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
