"""Reading every file of a cache out of an S3 server on loopback: obstore, which the store uses, beside fsspec's s3fs.

    python benchmarks/buckets.py CACHE [--repeats 3]

Needs `pip install obstore s3fs moto[server]`. Publishes CACHE to moto's server, in a process of its own, then copies it
to the local disk, each object whole, by: Bucket.download in eight threads, as a reader does; s3fs's own `get` of all
files at once; s3fs's `get_file` in eight threads. The server is Python and slow, so what counts is the client's CPU
time, all threads; the best of the repeats. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import s3fs

from dflash_pipeline.store.bucket import Bucket
from dflash_pipeline.store.publish import publish_cache

URL = "s3://caches/one"
SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


def by_obstore(sizes: dict[str, int], out: Path) -> None:
    """Copy as the reader's mirror does."""
    bucket = Bucket(URL)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: bucket.download(name, out / name, sizes[name]), sizes))


def by_s3fs(sizes: dict[str, int], out: Path) -> None:
    """Copy with one call of s3fs."""
    fs = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    fs.get([f"{URL}/{name}" for name in sizes], [str(out / name) for name in sizes])


def by_s3fs_threads(sizes: dict[str, int], out: Path) -> None:
    """Copy with one call of s3fs a file."""
    fs = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)

    def get(name: str) -> None:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        fs.get_file(f"{URL}/{name}", str(out / name))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(get, sizes))


def measure(copy: Callable[[dict[str, int], Path], None], sizes: dict[str, int]) -> tuple[float, float]:
    """Return wall seconds and this process's CPU seconds of one copy."""
    with tempfile.TemporaryDirectory() as folder:
        wall, cpu = time.perf_counter(), time.process_time()
        copy(sizes, Path(folder))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        for name, size in sizes.items():
            assert (Path(folder) / name).stat().st_size == size
    return wall, cpu


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert server.stdout is not None
    address = f"http://127.0.0.1:{int(server.stdout.readline())}"
    os.environ |= {"AWS_ENDPOINT_URL": address, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    try:
        urllib.request.urlopen(urllib.request.Request(f"{address}/caches", method="PUT"), timeout=30).close()
        publish_cache(options.cache, URL)
        sizes = Bucket(URL).sizes("")
        print(f"{len(sizes)} objects, {sum(sizes.values()) / 1e6:.1f} MB; {platform.machine()}, ", end="")
        print(" ".join(f"{name} {version(name)}" for name in ("obstore", "s3fs", "moto")), end="\n\n")
        print("| copied by | wall, s | client's CPU, s |\n|---|---|---|")
        for copy in (by_obstore, by_s3fs, by_s3fs_threads):
            times = [measure(copy, sizes) for _ in range(options.repeats)]
            print(f"| {copy.__name__} | {min(wall for wall, _ in times):.2f} | {min(cpu for _, cpu in times):.2f} |")
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
