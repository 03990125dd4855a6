"""The settings of an extraction."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import ConfigError
from ..store.codecs import check_codec
from ..target import TargetConfig


@dataclass(frozen=True, kw_only=True)
class ExtractConfig:
    """What `dflash extract` is told. The command line takes its defaults from here.

    Attributes:
        corpus: files, folders of datasets and names of hub datasets, in order (`sources.open_sources`).
        target: a folder or a Hugging Face model id.
        out: the folder of the cache.
        layers: `auto` or ids such as `1,16,31,46,61`.
        max_length: longest row in tokens; None means the target's own limit.
        codec: how states are compressed.
        dtype: `bfloat16`, `float32`, or None for the checkpoint's own.
        attention: the attention implementation, by transformers' name.
        device: `auto`, `cpu`, `cuda`, `cuda:N`.
        num_workers: processes that this one starts and shares the work with, itself among them.
        worker: which of a machine's workers this is; `auto` gives each its own GPU.
        batch_tokens: most tokens, padding included, of one forward; a longer row is a batch of its own.
        shard_tokens: most tokens of one shard; a longer row is a shard of its own. A shard is held in memory while it
            is computed, and is what a killed extraction loses at most.
        top_k: how many of the target's most likely next tokens are stored.
        keep_final: also store the last layer's output.
        limit_rows, limit_tokens: stop after so many usable rows or tokens.
        append: extend the finished cache at `out` by these corpus files; lengths and limits hold for them alone.
        strict: refuse a corpus of which a row would be skipped.
        dry_run: read the corpus, estimate, and stop.
        revision, trust_remote_code: as transformers takes them.

    Raises:
        ConfigError: a value is out of range.
    """

    corpus: tuple[Path | str, ...]
    target: str
    out: Path
    layers: str = "auto"
    max_length: int | None = None
    codec: str = "lossless"
    dtype: str | None = None
    attention: str = "sdpa"
    device: str = "auto"
    num_workers: int = 1
    worker: int = 0
    batch_tokens: int = 8192
    shard_tokens: int = 32768
    top_k: int = 8
    keep_final: bool = False
    limit_rows: int | None = None
    limit_tokens: int | None = None
    append: bool = False
    strict: bool = False
    dry_run: bool = False
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        numbers = ("max_length", "batch_tokens", "shard_tokens", "top_k", "limit_rows", "limit_tokens", "num_workers")
        for name in numbers:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} {value}: expected at least 1")
        check_codec(self.codec)
        self.target_config()  # checks dtype and device

    def target_config(self) -> TargetConfig:
        """Return the part of the settings that loads the target."""
        return TargetConfig(
            name=self.target,
            dtype=self.dtype,
            attention=self.attention,
            device=self._device(),
            trust_remote_code=self.trust_remote_code,
            revision=self.revision,
        )

    def _device(self) -> str:
        if self.device != "auto" or self.worker == 0 or not torch.cuda.is_available():
            return self.device
        return f"cuda:{self.worker % torch.cuda.device_count()}"
