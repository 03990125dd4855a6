"""Which rows and anchors a pack holds.

A pack is several rows back to back, without padding. Axes: R rows, T tokens of the pack, A anchors, B slots of a
block. Block tensors are flat, anchor by anchor: [A*B, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import ConfigError

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class PackLayout:
    """Rows and anchors of a pack, on the CPU.

    row_offsets: [R+1] int64, from 0 to T. anchors: [A] int64, the index in the pack of each block's first slot,
    in the order of the rows and not descending within a row. A block sees its row's positions before its anchor, so
    an anchor may stand one past its row's end (inference: the anchor token itself has no state yet).

    anchor_rows: [A] int64, the row of each anchor. Where it is left out, an anchor belongs to the row that holds its
    index; only the last row can then have an anchor at its end.

    Derived: row_starts [A], the first index of each anchor's row; positions [T], positions in the row;
    anchor_positions [A], the anchors' positions in their rows. Masks that depend on the layout alone are kept with it
    (`cached`), so that all layers share them. Raises ConfigError for offsets or anchors that do not fit.
    """

    row_offsets: Tensor
    anchors: Tensor
    anchor_rows: Tensor | None = None
    rows: Tensor = field(init=False)
    row_starts: Tensor = field(init=False)
    positions: Tensor = field(init=False)
    anchor_positions: Tensor = field(init=False)
    _cache: dict[Hashable, Any] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        offsets, anchors = self.row_offsets, self.anchors
        if offsets.dtype != torch.int64 or anchors.dtype != torch.int64 or offsets.ndim != 1 or anchors.ndim != 1:
            raise ConfigError("row_offsets and anchors must be one-dimensional int64 tensors")
        if len(offsets) == 0 or offsets[0] != 0 or bool((offsets.diff() < 0).any()):
            raise ConfigError(f"row_offsets must rise from 0, found {offsets.tolist()[:8]}")
        num_rows, num_tokens = len(offsets) - 1, int(offsets[-1])
        if len(anchors) and (num_rows == 0 or int(anchors.min()) < 0 or int(anchors.max()) > num_tokens):
            raise ConfigError(f"anchors must lie in 0..{num_tokens}, found {anchors.tolist()[:8]}")
        rows = self.anchor_rows
        if rows is None:
            rows = (torch.searchsorted(offsets, anchors, right=True) - 1).clamp(max=max(num_rows - 1, 0))
        elif rows.shape != anchors.shape or bool(((rows < 0) | (rows >= num_rows)).any()):
            raise ConfigError(f"anchor_rows must name one of the {num_rows} rows for each anchor")
        starts = offsets[rows]
        if bool(((anchors < starts) | (anchors > offsets[rows + 1] if num_rows else False)).any()):
            raise ConfigError("an anchor lies outside its row")
        if bool((rows.diff() < 0).any()) or bool(((rows.diff() == 0) & (anchors.diff() < 0)).any()):
            raise ConfigError("anchors must be sorted by row and position")
        lengths = offsets.diff()
        positions = torch.arange(num_tokens) - torch.repeat_interleave(offsets[:-1], lengths)
        for name, value in (
            ("rows", rows),
            ("row_starts", starts),
            ("positions", positions),
            ("anchor_positions", anchors - starts),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def single_row(cls, num_tokens: int, anchors: Sequence[int]) -> PackLayout:
        """Return the layout of one row of `num_tokens` tokens; an anchor may equal `num_tokens`."""
        return cls(torch.tensor([0, num_tokens]), torch.tensor(list(anchors), dtype=torch.int64))

    def part(self, which: slice) -> PackLayout:
        """Return the layout of some of the anchors in the same rows; masks are its own."""
        return PackLayout(self.row_offsets, self.anchors[which], self.rows[which])

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.row_offsets) - 1

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.row_offsets[-1])

    @property
    def num_anchors(self) -> int:
        """A."""
        return len(self.anchors)

    def slot_positions(self, block_size: int) -> Tensor:
        """Return [A*B] int64: the position in its row of every slot, a + k."""
        return (self.anchor_positions[:, None] + torch.arange(block_size)).flatten()

    def cached(self, key: Hashable, build: Callable[[], Value]) -> Value:
        """Return what `build` makes, made once per key: masks and tiles are shared by all layers of a forward."""
        if key not in self._cache:
            self._cache[key] = build()
        value: Value = self._cache[key]
        return value
