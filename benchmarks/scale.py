"""How a training step grows with its sizes, and start-up with the corpus.

    python benchmarks/scale.py [--only step|startup] [--rows 1000 30000] [--json]

A step (see ours.py) is measured in a fresh process per setting: each size is varied alone, the others as in the first
line. Start-up is the wall time of `dflash train --steps 1` on caches of the embedded target with so many short rows.
Ratios to the first line of each table are what counts; seconds are this machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

OURS = Path(__file__).with_name("ours.py")
SMALL = {"hidden": 256, "intermediate": 768, "heads": 4, "kv-heads": 2, "head-dim": 64, "layers": 3}
BASE = SMALL | {"vocab": 16384, "tokens": 1024, "anchors": 64, "block": 8}
GROWTH = {"tokens": (2048, 4096, 8192), "anchors": (128, 256, 512), "block": (16, 32), "vocab": (65536, 150_000)}
DFLASH = [sys.executable, "-m", "dflash_pipeline.cli"]


def step_figures(sizes: dict[str, int], runs: int) -> dict[str, Any]:
    """Return step_seconds and peak_bytes of one setting, measured in a process of its own."""
    command = [sys.executable, str(OURS), "--runs", str(runs)]
    for name, value in sizes.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    return {key: figures[key] for key in ("step_seconds", "peak_bytes", "useful_flops")}


def grow_step(runs: int) -> list[dict[str, Any]]:
    """Return a line per setting: the base, then each size grown alone, with ratios to the base."""
    base = step_figures(BASE, runs)
    lines = [{"setting": "base", **base, "time_ratio": 1.0, "work_ratio": 1.0, "memory_ratio": 1.0}]
    for name, values in GROWTH.items():
        for value in values:
            found = step_figures(BASE | {name: value}, runs)
            ratios = {
                "time_ratio": found["step_seconds"] / base["step_seconds"],
                "work_ratio": found["useful_flops"] / base["useful_flops"],
                "memory_ratio": found["peak_bytes"] / base["peak_bytes"],
            }
            lines.append({"setting": f"{name} {value:,}", **found, **ratios})
    return lines


def write_corpus(path: Path, num_rows: int) -> None:
    """Write rows of ready ids: short prompts, replies of a few tokens."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_rows):
            ids = [draw.randrange(300, 900) for _ in range(24)]
            row = {"id": f"row-{number}", "prompt_ids": ids[:8], "completion_ids": ids[8:]}
            file.write(json.dumps(row) + "\n")


def start_up(rows: list[int], rounds: int = 3) -> list[dict[str, Any]]:
    """Return seconds from the start of the process to its end after one step, per corpus size, the best of `rounds`."""
    target = Path(__file__).parents[1] / "examples" / "embedded" / "target"
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        caches = []
        for number in rows:
            corpus, cache = Path(folder) / f"{number}.jsonl", Path(folder) / f"cache-{number}"
            write_corpus(corpus, number)
            extract = ["extract", "--corpus", str(corpus), "--target", str(target), "--out", str(cache), "--json"]
            subprocess.run([*DFLASH, *extract], check=True, capture_output=True)
            caches.append(cache)
        best = [float("inf")] * len(rows)
        for turn in range(rounds):
            for which, cache in enumerate(caches):
                out = Path(folder) / f"run-{which}-{turn}"
                train = ["train", "--cache", str(cache), "--out", str(out), "--steps", "1", "--json"]
                before = time.perf_counter()
                subprocess.run([*DFLASH, *train, "--set", "heldout_share=0.0"], check=True, capture_output=True)
                best[which] = min(best[which], time.perf_counter() - before)
        for number, seconds in zip(rows, best, strict=True):
            lines.append({"rows": number, "seconds": seconds, "ratio": seconds / best[0]})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["step", "startup"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 30_000])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report: dict[str, Any] = {"machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"}
    if args.only != "startup":
        report["step"] = grow_step(args.runs)
    if args.only != "step":
        report["startup"] = start_up(args.rows)
    if args.json:
        print(json.dumps(report))
        return
    print(report["machine"])
    for line in report.get("step", []):
        print(
            f"{line['setting']:>16}: {line['step_seconds']:.3f} s "
            f"(x{line['time_ratio']:.2f} for x{line['work_ratio']:.2f} the work), "
            f"{line['peak_bytes'] / 2**20:,.0f} MiB (x{line['memory_ratio']:.2f})"
        )
    for line in report.get("startup", []):
        print(f"{line['rows']:>16,} rows: {line['seconds']:.2f} s to the end of one step (x{line['ratio']:.2f})")


if __name__ == "__main__":
    main()
