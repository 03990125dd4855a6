"""What checking costs: crc32c beside decoding on every read, and `dflash cache verify` over a whole cache.

    python benchmarks/verification.py [--cache CACHE] [--max-tokens 16384] [--repeats 5]

CACHE is any cache of `dflash extract`; without it, a synthetic one is written (normal states, each channel with its own
scale) in bfloat16 and in float32. Decoding is the reader's own `read_runs`, checks included; the checksums are those of
the same bytes, alone. Times are the thread's CPU seconds, the best of the repeats; verify's are those of the process,
beside the wall clock. Prints Markdown.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import google_crc32c
import numpy as np

from dflash_pipeline.store import verify
from dflash_pipeline.store.arrays import ArraySpec
from dflash_pipeline.store.decode import CHECKSUM_BYTES, INDEX_ENTRY_BYTES, read_runs
from dflash_pipeline.store.encode import create_group, write_array
from dflash_pipeline.store.layout import chunk_file, shard_dir, states_name
from dflash_pipeline.store.manifest import read_manifest


@dataclass(frozen=True)
class DataFile:
    """One array on disk."""

    name: str
    path: Path
    spec: ArraySpec


def synthetic(directory: Path, dtype: str, num_tokens: int, hidden: int = 576) -> DataFile:
    """Write one layer's states."""
    random = np.random.default_rng(0)
    states = (random.standard_normal((num_tokens, hidden)) * random.lognormal(0, 1, hidden)).astype(np.float32)
    stored = (states.view(np.uint32) >> 16).astype(np.uint16) if dtype == "uint16" else states
    spec = ArraySpec(name=dtype, shape=stored.shape, dtype=dtype)
    directory.mkdir()
    write_array(directory, create_group(directory), spec, "lossless", stored)
    return DataFile("bfloat16" if dtype == "uint16" else dtype, directory / chunk_file(dtype, 2), spec)


def of_cache(cache: Path, max_tokens: int) -> list[DataFile]:
    """Return the states of the first shards of a cache."""
    manifest, found, tokens = read_manifest(cache), [], 0
    dtype = {"bfloat16": "uint16", "float32": "float32"}[manifest.identity.dtype]
    for record in manifest.shards:
        for layer in manifest.identity.layer_ids if record.num_rows else ():
            name = states_name(layer)
            spec = ArraySpec(name=name, shape=(record.num_tokens, manifest.hidden_size), dtype=dtype)
            path = shard_dir(cache, record.shard) / chunk_file(name, 2)
            found.append(DataFile(manifest.identity.dtype, path, spec))
        tokens += record.num_tokens
        if tokens >= max_tokens:
            break
    return found


def payloads(file: DataFile) -> list[bytes]:
    """Return what is checked of a file: its chunks without their checksums."""
    data = file.path.read_bytes()
    chunks = -(-file.spec.shape[0] // file.spec.pipeline("lossless").chunk_items)
    start = len(data) - CHECKSUM_BYTES - chunks * INDEX_ENTRY_BYTES
    index = np.frombuffer(data[start:-CHECKSUM_BYTES], "<u8").reshape(-1, 2).tolist()
    return [data[offset : offset + length - CHECKSUM_BYTES] for offset, length in index]


def seconds(function: Callable[[], object], repeats: int) -> float:
    """Return the least CPU seconds of this thread."""
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        function()
        times.append(time.thread_time() - start)
    return min(times)


def row(files: list[DataFile], repeats: int) -> str:
    """Measure some files of one kind; return a line of the table."""

    def decode() -> None:
        for file in files:
            runs = [(0, file.spec.shape[0])]
            pipeline, size = file.spec.pipeline("lossless"), file.path.stat().st_size
            read_runs(file.path, size, file.spec.shape, file.spec.dtype, pipeline, runs)

    checked = [payload for file in files for payload in payloads(file)]
    raw = sum(int(np.prod(file.spec.shape)) * np.dtype(file.spec.dtype).itemsize for file in files)
    stored = sum(map(len, checked))
    out = seconds(decode, repeats)
    crc = seconds(lambda: [google_crc32c.value(payload) for payload in checked], repeats)
    return (
        f"| {files[0].name} | {stored / raw:.3f} | {raw / out / 1e9:.2f} | {stored / crc / 1e9:.1f} | {crc / out:.1%} |"
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    packages = " ".join(f"{name} {version(name)}" for name in ("numcodecs", "google-crc32c", "xxhash"))
    print(f"{platform.machine()}, Python {platform.python_version()}, {packages}\n")
    print("| states | size / raw | decoding, GB/s | crc32c, GB/s of stored bytes | crc32c, share of decoding |")
    print("|---|---|---|---|---|")
    if options.cache:
        print(row(of_cache(options.cache, options.max_tokens), options.repeats))
        wall, cpu = time.perf_counter(), time.process_time()
        found = verify(options.cache)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        rate = found["bytes"] / max(cpu, 1e-9) / 1e9
        print(f"\nverify: {found['files']:,} files, {found['bytes'] / 1e9:.3f} GB; {wall:.2f} s, {cpu:.2f} s of CPU")
        print(f"({rate:.1f} GB per CPU second)")
        return
    with tempfile.TemporaryDirectory() as folder:
        for dtype in ("uint16", "float32"):
            print(row([synthetic(Path(folder, dtype), dtype, options.max_tokens)], options.repeats))


if __name__ == "__main__":
    main()
