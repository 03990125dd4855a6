"""The target's head: all that a trainer ever loads of the target.

V vocabulary rows, H hidden.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import CacheCorrupt, CacheMissing, ConfigError
from .layout import HEAD, TARGET, file_size

OS_ERROR = re.compile(r"(?:os error|code:) (\d+)")


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetHead:
    """Embeddings, output head and final norm of the target.

    Attributes:
        embed_tokens: [V, H] input embeddings.
        lm_head: [V, H] output head, or None where it is tied to the embeddings.
        norm: [H] the weight that is really multiplied in the final RMSNorm (1 + w where the model adds one).
        norm_eps: its epsilon.

    Raises:
        ConfigError: the shapes do not fit together.
    """

    embed_tokens: Tensor
    lm_head: Tensor | None
    norm: Tensor
    norm_eps: float

    def __post_init__(self) -> None:
        if self.embed_tokens.ndim != 2 or self.norm.shape != self.embed_tokens.shape[1:]:
            raise ConfigError(
                f"target head: embeddings {list(self.embed_tokens.shape)} and norm {list(self.norm.shape)} do not fit"
            )
        if self.lm_head is not None and (self.lm_head.ndim != 2 or self.lm_head.shape[1] != self.embed_tokens.shape[1]):
            raise ConfigError(f"target head: lm_head {list(self.lm_head.shape)} does not fit the embeddings")
        if not 0 < self.norm_eps < 1:
            raise ConfigError(f"target head: norm epsilon {self.norm_eps}: expected a number between 0 and 1")

    @property
    def head_weight(self) -> Tensor:
        """[V, H] the output head: `lm_head`, or the embeddings where it is tied."""
        return self.embed_tokens if self.lm_head is None else self.lm_head


def write_head(directory: Path, head: TargetHead) -> None:
    """Write head.safetensors into a folder. The epsilon is its only metadata entry (two would have no fixed order)."""
    tensors = {"embed_tokens": head.embed_tokens, "norm": head.norm}
    if head.lm_head is not None:
        tensors["lm_head"] = head.lm_head
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(tensors, str(directory / HEAD), metadata={"norm_eps": repr(float(head.norm_eps))})
    except SafetensorError as error:  # safetensors wraps what the system says
        code = OS_ERROR.search(str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(directory / HEAD)) from error


def read_head(cache: Path, hidden_size: int, vocab_size: int) -> TargetHead:
    """Read CACHE/target/head.safetensors.

    Raises:
        CacheMissing: there is none.
        CacheCorrupt: it is damaged, or not the head of this cache.
    """
    path = cache / TARGET / HEAD
    if file_size(path) is None:
        raise CacheMissing(f"{path}: missing; the cache needs the target's head, extract it again")
    try:
        with safe_open(str(path), framework="pt") as file:
            names = set(file.keys())
            norm_eps = float((file.metadata() or {}).get("norm_eps", "nan"))
            tensors = {name: file.get_tensor(name) for name in names & {"embed_tokens", "lm_head", "norm"}}
        head = TargetHead(
            embed_tokens=tensors["embed_tokens"],
            lm_head=tensors.get("lm_head"),
            norm=tensors["norm"],
            norm_eps=norm_eps,
        )
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise CacheCorrupt(f"{path}: not the head of a target ({error}); extract the cache again") from error
    _check_head(path, head, names, (vocab_size, hidden_size))
    return head


def _check_head(path: Path, head: TargetHead, names: set[str], shape: tuple[int, int]) -> None:
    unknown = names - {"embed_tokens", "lm_head", "norm"}
    if unknown:
        raise CacheCorrupt(f"{path}: unknown tensor {min(unknown)!r} in a target head")
    if tuple(head.head_weight.shape) != shape or head.embed_tokens.shape[1] != shape[1]:
        raise CacheCorrupt(f"{path}: head {list(head.head_weight.shape)}, the plan says {list(shape)}")
    for tensor in (head.embed_tokens, head.head_weight, head.norm):
        if not tensor.dtype.is_floating_point:
            raise CacheCorrupt(f"{path}: head of type {tensor.dtype}, expected floating point")
