"""Extending a finished cache with new corpus files: its shards stay, new ones come behind them.

The plan of the extended cache has a file of its own, and so have its statistics: the old manifest, and with it the old
cache, is valid until the new manifest takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CacheMismatch
from .bucket import is_url
from .layout import plan_file
from .plan import COLUMNS, Identity, Plan


def extend_plan(old: Plan, part: Plan, cache: Path) -> Plan:
    """Return the plan of a cache extended by a part.

    Args:
        old: the finished cache's.
        part: that of the new rows alone; its identity names the new corpus files alone.
        cache: for messages.

    Raises:
        CacheMismatch: the part was made with other settings or another target, or a row id or a file of it is in the
            cache already.
    """
    identity = _extend_identity(old.identity, part.identity, cache)
    known = set(old.row_ids)
    repeated = next((row_id for row_id in part.row_ids if row_id in known), None)
    if repeated is not None:
        raise CacheMismatch(f"{cache}: has a row {repeated!r} already: give the new rows other ids, or none")
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(old, name), getattr(part, name)])
        if isinstance(getattr(old, name), np.ndarray)
        else [*getattr(old, name), *getattr(part, name)]
        for name in (*COLUMNS, "shard_rows")
    }
    reasons = [*old.skipped, *(reason for reason in part.skipped if reason not in old.skipped)]
    skipped = {reason: old.skipped.get(reason, 0) + part.skipped.get(reason, 0) for reason in reasons}
    return Plan(identity=identity, hidden_size=old.hidden_size, vocab_size=old.vocab_size, skipped=skipped, **columns)


def is_appended(old: Plan, part: Plan) -> bool:
    """Tell whether a part is what the cache was last extended by."""
    if not old.identity.appended:
        return False
    last = old.identity.corpus[-old.identity.appended[-1] :]
    first = old.num_rows - part.num_rows
    return (
        [file.sha256 for file in last] == [file.sha256 for file in part.identity.corpus]
        and first > 0
        and old.row_ids[first:] == part.row_ids
        and old.num_tokens[first:].tolist() == part.num_tokens.tolist()
    )


def check_extends(old: Plan, plan: Plan) -> None:
    """Check that a plan has the old one's rows and shards first.

    Raises:
        CacheMismatch: it has not.
    """
    same_rows = all(
        np.array_equal(np.asarray(getattr(old, name)), np.asarray(getattr(plan, name)[: old.num_rows]))
        for name in COLUMNS
    )
    if not same_rows or plan.shard_rows[: old.num_shards] != old.shard_rows:
        raise CacheMismatch("the plan does not begin with the rows of the cache it extends")


def check_same_settings(old: Identity, new: Identity, cache: Path) -> None:
    """Check everything of two identities but their corpus.

    Raises:
        CacheMismatch: naming the field, both values and what to do.
    """
    differences = replace(new, corpus=old.corpus, appended=old.appended).differences(old)
    if differences:
        raise CacheMismatch(
            f"{cache}: cannot be extended: {name_differences(differences)}; give the settings and the target it was "
            "made with, or another --out without --append"
        )


def refuse_difference(path: Path | str, ours: Identity, found: Identity, *, extending: bool = False) -> None:
    """Refuse to go on in a cache of another identity, naming the first field that differs.

    Args:
        path: the cache, or its URL.
        ours, found: the identity of this run, and the one there.
        extending: the one there is that of an extension that was begun.

    Raises:
        CacheMismatch: they differ.
    """
    differences = ours.differences(found)
    if not differences:
        return
    remedy = other_place(path)
    if extending:
        unfinished = ", ".join(file.name for file in found.corpus[-found.appended[-1] :])
        remedy = (
            f"finish the extension by {unfinished} that was begun there, or delete "
            f"{path}/{plan_file(found.generation)} to give it up"
        )
    elif differences[0][0] == "corpus" and not is_url(path):
        remedy += "; --append extends a finished cache by new files"
    raise CacheMismatch(f"{path}: holds a cache of other inputs: {name_differences(differences)}; {remedy}")


def other_place(place: Path | str) -> str:
    """Return what to do where the place of a cache is taken, for a message."""
    return f"use another --out, or delete {'what is there' if is_url(place) else 'that folder'}"


def name_differences(differences: Sequence[tuple[str, object, object]]) -> str:
    """Return what differs between two identities, for a message: the first field with both values, the others' names.

    differences: (field, value now, value in the cache), at least one.
    """
    name, ours, theirs = differences[0]
    more = "" if len(differences) == 1 else f" (and {', '.join(entry[0] for entry in differences[1:])})"
    there, now = ("not given" if value is None else value for value in (theirs, ours))
    return f"{name} is {there} there, {now} now{more}"


def _extend_identity(old: Identity, part: Identity, cache: Path) -> Identity:
    check_same_settings(old, part, cache)
    known = {file.sha256: file.name for file in old.corpus}
    for file in part.corpus:
        if file.sha256 in known:
            raise CacheMismatch(
                f"{cache}: the corpus file {file.name} is in it already, as {known[file.sha256]}: leave it out"
            )
    return replace(old, corpus=(*old.corpus, *part.corpus), appended=(*old.appended, len(part.corpus)))
