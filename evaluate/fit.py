"""Whether a drafter and what it is to be measured on are of one target, as far as sizes tell."""

from __future__ import annotations

from ..drafter.config import DrafterConfig
from ..errors import ConfigError


def check_sizes(drafter: DrafterConfig, place: str, *, hidden_size: int, vocab_size: int, num_layers: int) -> None:
    """Refuse a target, or a cache of one, whose sizes are not those that a drafter was made for.

    Args:
        drafter: its configuration.
        place: the target or the cache, for the message.
        hidden_size, vocab_size, num_layers: of the target; `vocab_size` counts the rows of its head.

    Raises:
        ConfigError: naming the first size that differs, and both values.
    """
    for what, ours, theirs in (
        ("hidden size", drafter.hidden_size, hidden_size),
        ("vocabulary", drafter.vocab_size, vocab_size),
        ("number of target layers", drafter.num_target_layers, num_layers),
    ):
        if ours != theirs:
            raise ConfigError(f"{place}: {what} {theirs}, the drafter's is {ours}: they are of different targets")
