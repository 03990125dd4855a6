"""What is checked before a cache is begun."""

from __future__ import annotations

from pathlib import Path

from ..errors import CacheMismatch, ConfigError
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


def refuse_strangers(cache: Path) -> None:
    """Refuse a place that cannot become a cache, before anything is read for it or written into it.

    Raises:
        CacheMismatch: it is a file, or a folder that holds other things than a cache.
    """
    if not cache.exists():
        place = next(parent for parent in cache.absolute().parents if parent.exists())
        if not place.is_dir():
            raise CacheMismatch(f"{cache}: cannot be made, for {place} is a file; use another --out")
        return
    if (cache / PLAN).exists():
        return
    if not cache.is_dir():
        raise CacheMismatch(f"{cache}: is a file; the cache needs a folder of its own, use another --out")
    ours = {LOCK, CLAIMS, SHARDS, TARGET}
    strangers = sorted(
        path.name for path in cache.iterdir() if path.name not in ours and not path.name.startswith(TEMP_PREFIX)
    )
    if strangers:
        raise CacheMismatch(f"{cache}: holds {strangers[0]!r} and no cache; use an empty or new folder as --out")
