"""What is checked before a cache is begun."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import CacheMismatch, ConfigError, DflashError
from .codecs import check_codec
from .head import TargetHead
from .layout import CLAIMS, LOCK, PLAN, SHARDS, TARGET, TEMP_PREFIX
from .plan import Plan


def check_fits(plan: Plan, head: TargetHead) -> None:
    """Check that a plan's codec exists and that the head fits it.

    Raises:
        ConfigError: they do not.
    """
    check_codec(plan.identity.codec)
    if tuple(head.head_weight.shape) != (plan.vocab_size, plan.hidden_size):
        raise ConfigError(
            f"target head {list(head.head_weight.shape)} does not fit the plan: "
            f"expected [{plan.vocab_size}, {plan.hidden_size}]"
        )


def check_writable(folder: Path, option: str = "--out") -> None:
    """Refuse a folder that cannot be made or written, as far as that is seen without writing.

    `option` is the one that names another folder.

    Raises:
        CacheMismatch: it is a file, or would be below one.
        DflashError: this user may not write there.
    """
    place = _nearest(folder, option)
    if not os.access(place, os.W_OK | os.X_OK):
        below = "" if place == folder.absolute() else f", for {place} may not be written"
        raise DflashError(f"{folder}: cannot be written{below}; use another {option}")


def _nearest(folder: Path, option: str) -> Path:
    """Return the folder itself, or where it is not there the one above it that is."""
    absolute = folder.absolute()
    place = next(path for path in (absolute, *absolute.parents) if os.path.lexists(path))
    if not place.is_dir():
        what = "a file" if place.exists() else "a link to nothing"
        problem = f"is {what}" if place == absolute else f"cannot be made, for {place} is {what}"
        raise CacheMismatch(f"{folder}: {problem}; use another {option}")
    return place


def refuse_strangers(cache: Path) -> None:
    """Refuse a place that cannot become a cache, before anything is read for it or written into it.

    Raises:
        CacheMismatch: it is a file, or a folder that holds other things than a cache.
    """
    if not cache.exists():
        _nearest(cache, "--out")
        return
    if (cache / PLAN).exists():
        return
    if not cache.is_dir():
        raise CacheMismatch(f"{cache}: is a file; the cache needs a folder of its own, use another --out")
    ours = {LOCK, CLAIMS, PLAN, SHARDS, TARGET}  # the plan too: another writer may begin the cache meanwhile
    strangers = sorted(
        path.name for path in cache.iterdir() if path.name not in ours and not path.name.startswith(TEMP_PREFIX)
    )
    if strangers:
        raise CacheMismatch(f"{cache}: holds {strangers[0]!r} and no cache; use an empty or new folder as --out")
