"""Named recipes, and how a recipe is read: a TOML file of a few keys over a parent, with `--set key=value` on top."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..recipe import Recipe

_FOLDER = Path(__file__).parent
_KEYS = tuple(field.name for field in fields(Recipe))


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load_recipe(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe by name or file, follow its parents, and apply overrides.

    Args:
        name: the name of a recipe of this package, or the path of a TOML file.
        overrides: `key=value` texts; the value is TOML, or a bare word.

    Raises:
        ConfigError: no such recipe, a key is unknown, or a value is not valid.
    """
    values = _read(name, seen=())
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"--set {override}: expected key=value")
        _check_key(key.strip(), f"--set {override}")
        values[key.strip()] = _parse(text.strip())
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return Recipe(**given)


def _read(name: str, seen: tuple[str, ...]) -> dict[str, Any]:
    path = _FOLDER / f"{name}.toml"
    if not path.exists():
        path = Path(name)
        if path.suffix != ".toml" or not path.exists():
            raise ConfigError(f"recipe {name!r}: expected a TOML file or one of {', '.join(recipe_names())}")
    if str(path) in seen:
        raise ConfigError(f"recipe {path}: it is its own parent")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path}: not valid TOML: {error}") from None
    parent = values.pop("parent", None)
    for key in values:
        _check_key(key, f"recipe {path}")
    return (_read(str(parent), (*seen, str(path))) if parent is not None else {}) | values


def _check_key(key: str, where: str) -> None:
    if key not in _KEYS:
        close = difflib.get_close_matches(key, _KEYS, n=1)
        hint = f"did you mean {close[0]}?" if close else "see `dflash train --print-config` for the keys"
        raise ConfigError(f"{where}: unknown key {key!r}; {hint}")


def _parse(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
