"""The settings of an extraction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..errors import ConfigError
from ..store.bucket import is_url
from ..store.codecs import check_codec
from ..store.leases import LEASE_SECONDS, check_lease
from ..target import TargetConfig


@dataclass(frozen=True, kw_only=True)
class ExtractConfig:
    """What `dflash extract` is told. The command line takes its defaults from here.

    Attributes:
        corpus: files, folders of datasets and names of hub datasets, in order (`sources.open_sources`).
        target: a folder or a Hugging Face model id.
        out: the folder of the cache, or its URL in a bucket.
        work: with a URL, the local folder in which shards are built; None means ~/.cache/dflash/extract.
        lease_seconds: with a URL, how long the shard of a worker that died is left alone.
        rank, world_size: which of how many workers this is, for buckets that cannot tell who claimed a shard first.
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
    out: Path | str
    work: Path | None = None
    lease_seconds: float = LEASE_SECONDS
    rank: int = 0
    world_size: int = 1
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
        check_lease(self.lease_seconds)
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank}: expected 0 to {self.world_size - 1}, less than the number of workers")
        if is_url(self.out) and self.append:
            raise ConfigError(
                f"{self.out}: --append extends a folder: copy the cache into one (such as by `aws s3 sync` or "
                f"`gcloud storage rsync`), extend it there, then `dflash cache publish FOLDER {self.out}`"
            )
        if self.work is not None and not is_url(self.out):
            raise ConfigError(f"work {self.work}: only an output in a bucket is built in another folder; leave it out")
        self.target_config()  # checks dtype and device

    @property
    def folder(self) -> Path:
        """The local folder that is written: the cache's, or the one in which shards for a bucket are built."""
        return (self.work or Path.home() / ".cache/dflash/extract") if is_url(self.out) else Path(self.out)

    def for_worker(self, number: int) -> ExtractConfig:
        """Return the settings of one of the `num_workers` processes; this one is number 0."""
        return replace(
            self,
            num_workers=1,
            worker=number or self.worker,
            rank=self.rank * self.num_workers + number,
            world_size=self.world_size * self.num_workers,
        )

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
