"""Which decoder layers are captured: the default choice, the notation of the command line, and refusals.

A layer id is 0-based and means the output of that decoder layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError

DEFAULT_NUM_LAYERS = 5


def default_layer_ids(num_layers: int, k: int = DEFAULT_NUM_LAYERS) -> tuple[int, ...]:
    """Return the k default layer ids of a model of `num_layers` layers: int(round(1 + j * (n - 4) / (k - 1))).

    64 layers give (1, 16, 31, 46, 61). One layer (k = 1) gives the formula's last one, n - 3.

    Raises:
        ConfigError: the model is too shallow for k different layers.
    """
    if k < 1:
        raise ConfigError(f"{k} captured layers: expected at least 1")
    span = num_layers - 4
    ids = [num_layers - 3] if k == 1 else [int(round(1 + j * span / (k - 1))) for j in range(k)]  # noqa: RUF046
    if len(set(ids)) < k or min(ids) < 0 or max(ids) >= num_layers:
        raise ConfigError(
            f"a target of {num_layers} layers has no {k} different default layers (the rule gives "
            f"{', '.join(map(str, ids))}): name them yourself, for example --layers {_example(num_layers)}"
        )
    return tuple(ids)


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the ids as a tuple if each is a layer of the model, once, in ascending order.

    Raises:
        ConfigError: none, a duplicate, a negative or too large id, or descending ids.
    """
    ids = tuple(layer_ids)
    if not ids:
        raise ConfigError(f"no layer is named: give ids from 0 to {num_layers - 1}, for example 1,2,3")
    wrong = sorted({i for i in ids if not 0 <= i < num_layers})
    if wrong:
        raise ConfigError(
            f"layer ids {', '.join(map(str, wrong))}: the target has {num_layers} layers, so ids go from 0 to "
            f"{num_layers - 1} (0 is the output of the first layer)"
        )
    twice = sorted({i for i in ids if ids.count(i) > 1})
    if twice:
        raise ConfigError(f"layer ids {', '.join(map(str, twice))} are named twice: name each layer once")
    if list(ids) != sorted(ids):
        raise ConfigError(
            f"layer ids {', '.join(map(str, ids))} are not in ascending order: write "
            f"{','.join(map(str, sorted(ids)))} (a recipe may still use any subset)"
        )
    return ids


def parse_layer_ids(text: str, num_layers: int) -> tuple[int, ...]:
    """Return the layer ids that `auto` or a list like `1,16,31` means for a model of `num_layers` layers.

    Raises:
        ConfigError: the text is neither, or the ids are refused by `check_layer_ids` or `default_layer_ids`.
    """
    if text.strip() == "auto":
        return default_layer_ids(num_layers)
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"layers {text!r}: expected auto, or ids such as 1,16,31,46,61") from None
    return check_layer_ids(ids, num_layers)


def _example(num_layers: int) -> str:
    return ",".join(str(i) for i in range(min(num_layers, DEFAULT_NUM_LAYERS)))
