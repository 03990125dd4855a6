"""Compare lossless codings of captured states: size, and gigabytes a second in and out of one core.

    python benchmarks/codecs.py [--cache CACHE] [--max-tokens 16384] [--repeats 5]

CACHE is any cache of `dflash extract`; one made with --dtype float32 is measured in float32 and, rounded, in bfloat16.
Without it, states are synthetic (normal, each channel with its own scale): good for speed, not for size. Speed is raw
bytes per second of the thread's CPU time, the best of the repeats, so that other work on the machine matters little.
Prints Markdown; docs/log.md holds the figures the choice was made on.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import torch
import zarr
from numcodecs import Blosc, Zstd
from numpy.typing import NDArray
from zarr.storage import LocalStore

from dflash_pipeline.store import open_cache
from dflash_pipeline.store.arrays import ArraySpec
from dflash_pipeline.store.codecs import chunk_items
from dflash_pipeline.store.decode import read_runs
from dflash_pipeline.store.encode import create_group, write_array
from dflash_pipeline.store.layout import chunk_file

Array = NDArray[Any]
WHOLE = 2**26  # a block size of blosc larger than any chunk


@dataclass(frozen=True)
class Coding:
    """One way to code a chunk [tokens, channels]: lay it out, compress; decompress, lay it back."""

    name: str
    coder: Any
    channels_first: bool = False
    planes: bool = False

    def encode(self, chunk: Array) -> Any:
        laid = np.ascontiguousarray(chunk.T) if self.channels_first else chunk
        if self.planes:
            laid = np.ascontiguousarray(laid.reshape(-1, 1).view(np.uint8).T)
        return self.coder.encode(laid)

    def decode(self, data: Any, like: Array) -> Array:
        flat = np.frombuffer(self.coder.decode(data), np.uint8)
        if self.planes:
            flat = np.ascontiguousarray(flat.reshape(like.itemsize, -1).T).reshape(-1)
        laid = flat.view(like.dtype)
        return (
            np.ascontiguousarray(laid.reshape(like.shape[::-1]).T) if self.channels_first else laid.reshape(like.shape)
        )


CODINGS = [
    Coding("zstd 1", Zstd(1)),
    Coding("zstd 3", Zstd(3)),
    Coding("zstd 3, channels first", Zstd(3), channels_first=True),
    Coding("blosc zstd 1, shuffle, its own blocks", Blosc("zstd", 1, Blosc.SHUFFLE)),
    Coding("blosc zstd 1, bitshuffle, whole chunk", Blosc("zstd", 1, Blosc.BITSHUFFLE, WHOLE)),
    Coding("blosc zstd 1, shuffle, whole chunk", Blosc("zstd", 1, Blosc.SHUFFLE, WHOLE)),
    Coding("blosc zstd 2 (level 3), shuffle, whole chunk", Blosc("zstd", 2, Blosc.SHUFFLE, WHOLE)),
    Coding("blosc zstd 1, shuffle, whole chunk, channels first", Blosc("zstd", 1, Blosc.SHUFFLE, WHOLE), True),
    Coding("byte planes by numpy, zstd 3, channels first", Zstd(3), channels_first=True, planes=True),
]


def cpu_seconds(function: Callable[[], Any], repeats: int, clock: Callable[[], float] = time.thread_time) -> float:
    """Return the least CPU time of a few calls."""
    best = float("inf")
    for _ in range(repeats):
        start = clock()
        function()
        best = min(best, clock() - start)
    return best


def load_states(cache: Path | None, max_tokens: int) -> list[Array]:
    """Return [N, H] float32 or uint16 (bfloat16 patterns) states, one array per layer."""
    if cache is None:
        source = np.random.default_rng(0)
        scale = np.exp(source.normal(0, 1, (5, 1, 576)))
        return list((source.standard_normal((5, max_tokens, 576)) * scale).astype(np.float32))
    reader = open_cache(cache)
    layers: dict[int, list[torch.Tensor]] = {layer: [] for layer in reader.layer_ids}
    tokens = 0
    for shard in range(reader.num_shards):
        for row in reader.read_shard(shard, top_k=False):
            for layer, states in row.states.items():
                layers[layer].append(states)
            tokens += len(row.tokens)
        if tokens >= max_tokens:
            break
    joined = [torch.cat(parts)[:max_tokens] for parts in layers.values()]
    if reader.dtype == torch.bfloat16:
        return [states.view(torch.uint16).numpy() for states in joined]
    return [states.numpy() for states in joined]


def as_bfloat16(states: Array) -> Array:
    rounded: Array = torch.from_numpy(states).to(torch.bfloat16).view(torch.uint16).numpy()
    return rounded


def compare_codings(layers: list[Array], repeats: int) -> None:
    """Print a line per coding: chunks in memory, one thread."""
    items = chunk_items(layers[0][0].nbytes, len(layers[0]))
    chunks = [states[start : start + items] for states in layers for start in range(0, len(states) - items + 1, items)]
    raw = sum(chunk.nbytes for chunk in chunks)
    print(f"\n{layers[0].dtype} patterns, chunks of {items} tokens, {raw / 1e6:.0f} MB\n")
    print("| coding | size / raw | GB/s in | GB/s out | crc32c, share of out |\n|---|---|---|---|---|")
    for coding in CODINGS:
        encoded = [coding.encode(chunk) for chunk in chunks]
        for chunk, data in zip(chunks, encoded, strict=True):
            assert np.array_equal(coding.decode(data, chunk), chunk), coding.name
        size = sum(len(data) for data in encoded)
        seconds_in = cpu_seconds(lambda c=coding: [c.encode(chunk) for chunk in chunks], repeats)  # type: ignore[misc]
        pairs = list(zip(encoded, chunks, strict=True))
        seconds_out = cpu_seconds(
            lambda c=coding, p=pairs: [c.decode(data, like) for data, like in p],  # type: ignore[misc]
            repeats,
        )
        seconds_crc = cpu_seconds(lambda e=encoded: [google_crc32c.value(data) for data in e], repeats)  # type: ignore[misc]
        print(
            f"| {coding.name} | {size / raw:.4f} | {raw / seconds_in / 1e9:.2f} | {raw / seconds_out / 1e9:.2f} "
            f"| {seconds_crc / (seconds_crc + seconds_out):.0%} |"
        )


def compare_readers(layers: list[Array], repeats: int) -> None:
    """Print our writer and reader against zarr's, on files, all threads' CPU time counted."""
    print("\n| files, the chosen coding | GB/s in | GB/s out |\n|---|---|---|")
    states = layers[len(layers) // 2]
    spec = ArraySpec(name="a", shape=states.shape, dtype=str(states.dtype))
    pipeline = spec.pipeline("lossless")

    def write_ours(directory: Path) -> None:
        write_array(directory, create_group(directory), spec, "lossless", states)

    def write_zarr(directory: Path) -> None:
        chunk = (pipeline.chunk_items, *states.shape[1:])
        whole = (-(-len(states) // chunk[0]) * chunk[0], *states.shape[1:])
        options: dict[str, Any] = {"filters": (), "compressors": pipeline.compressors, "fill_value": 0}
        array = create_group(directory).create_array(
            "a", shape=states.shape, dtype=spec.dtype, chunks=chunk, shards=whole, **options
        )
        array[...] = states

    def read_ours(directory: Path) -> Array:
        path = directory / chunk_file("a", 2)
        return read_runs(path, path.stat().st_size, spec.shape, spec.dtype, pipeline, [(0, len(states))])[0]

    def read_zarr(directory: Path) -> Array:
        return np.asarray(zarr.open_array(LocalStore(directory, read_only=True), path="a", mode="r")[...])

    for name, write, read in (("dflash", write_ours, read_ours), ("zarr", write_zarr, read_zarr)):
        with tempfile.TemporaryDirectory() as folder:
            places = iter(range(repeats + 1))
            write(Path(folder) / "last")
            assert np.array_equal(read(Path(folder) / "last"), states)
            seconds_in = cpu_seconds(
                lambda w=write, f=folder, p=places: w(Path(f) / str(next(p))),  # type: ignore[misc]
                repeats,
                time.process_time,
            )
            seconds_out = cpu_seconds(
                lambda r=read, f=folder: r(Path(f) / "last"),  # type: ignore[misc]
                repeats,
                time.process_time,
            )
        print(f"| {name} | {states.nbytes / seconds_in / 1e9:.2f} | {states.nbytes / seconds_out / 1e9:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="a cache to take states from; synthetic ones without it")
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    layers = load_states(options.cache, options.max_tokens)
    source = "synthetic states"
    if options.cache is not None:
        source = f"states of {open_cache(options.cache).manifest.identity.target_name}"
    packages = ", ".join(f"{name} {version(name)}" for name in ("numcodecs", "zarr", "numpy"))
    print(f"{source}, {len(layers)} layers of {list(layers[0].shape)}")
    print(f"{platform.machine()}, {os.cpu_count()} cores; {packages}")
    variants = [layers] if layers[0].dtype == np.uint16 else [[as_bfloat16(states) for states in layers], layers]
    for variant in variants:
        compare_codings(variant, options.repeats)
        compare_readers(variant, options.repeats)


if __name__ == "__main__":
    main()
