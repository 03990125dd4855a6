"""Compare one training step (forward and backward, no optimiser) with a peer's, on the same sizes and machine.

    python benchmarks/step.py --peer-python PYTHON --peer-script SCRIPT [--tokens N] [--anchors N] [--block N]
        [--dtypes float32 bfloat16] [--json]

PYTHON is the interpreter of the peer's own environment, SCRIPT prints one JSON line with step_seconds and peak_bytes
for --tokens, --anchors, --block and the other sizes (`benchmarks/ours.py` is ours, same options). Both must have the
same torch. The two run in turn, each in a fresh process, in float32 and in bfloat16 autocast; a ratio is the median
over the rounds. speed_ratio = peer's seconds / ours; memory_ratio = our peak bytes / the peer's; best_ratio compares
each side's faster dtype of those measured; peak_share = useful FLOPs over time and over the matmul peak of the same
dtype in the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from ours import sizes_parser

DTYPES = ("float32", "bfloat16")
OURS = Path(__file__).with_name("ours.py")
SIZES = ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "layers", "vocab", "tokens", "anchors", "block")


def run(python: str, script: Path, args: argparse.Namespace, dtype: str, *more: str) -> dict[str, Any]:
    """Run one side once; return what it printed."""
    command = [python, str(script), "--dtype", dtype, "--runs", str(args.runs), *more]
    for name in SIZES:
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{script} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def check_peer(python: str) -> None:
    """Leave with what to install where the peer's environment is not comparable."""
    code = "import torch, importlib.metadata as m; print(torch.__version__); print(m.version('speculators'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    lines = done.stdout.split()
    if done.returncode or lines[0] != torch.__version__:
        found = lines[0] if lines else done.stderr.strip().splitlines()[-1]
        version = torch.__version__.partition("+")[0]
        sys.exit(
            f"{python}: expected torch {torch.__version__} and speculators, found {found}; "
            f"run {python} -m pip install torch=={version} speculators==0.9.0"
        )


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Return all ratios."""
    ours: dict[str, list[dict[str, Any]]] = {dtype: [] for dtype in args.dtypes}
    peer: dict[str, list[dict[str, Any]]] = {dtype: [] for dtype in args.dtypes}
    for _ in range(args.rounds):
        for dtype in args.dtypes:
            ours[dtype].append(run(sys.executable, OURS, args, dtype))
            peer[dtype].append(run(args.peer_python, args.peer_script, args, dtype))

    def median(results: list[dict[str, Any]], key: str) -> float:
        return statistics.median(result[key] for result in results)

    report: dict[str, Any] = {"peak_share": {}}
    for dtype in args.dtypes:
        pairs = list(zip(ours[dtype], peer[dtype], strict=True))
        report[dtype] = {
            "speed_ratio": statistics.median(theirs["step_seconds"] / mine["step_seconds"] for mine, theirs in pairs),
            "memory_ratio": statistics.median(mine["peak_bytes"] / theirs["peak_bytes"] for mine, theirs in pairs),
            "our_seconds": median(ours[dtype], "step_seconds"),
            "peer_seconds": median(peer[dtype], "step_seconds"),
            "our_peak_bytes": median(ours[dtype], "peak_bytes"),
            "peer_peak_bytes": median(peer[dtype], "peak_bytes"),
        }
        report["peak_share"][dtype] = statistics.median(
            mine["useful_flops"] / mine["step_seconds"] / mine["matmul_flops_per_second"] for mine in ours[dtype]
        )
        report[dtype]["matmul_gflops"] = median(ours[dtype], "matmul_flops_per_second") / 1e9
    fastest = [min(median(side[dtype], "step_seconds") for dtype in args.dtypes) for side in (peer, ours)]
    report["best_ratio"] = fastest[0] / fastest[1]
    report["breakdown"] = run(sys.executable, OURS, args, "float32", "--breakdown")["breakdown"]
    report |= {name: getattr(args, name) for name in SIZES}
    report["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    return report


def main() -> None:
    parser = sizes_parser(__doc__)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--peer-script", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    check_peer(args.peer_python)
    report = compare(args)
    if args.json:
        print(json.dumps(report))
        return
    print(f"{args.tokens} tokens, {args.anchors} anchors, block {args.block}; {report['machine']}")
    for dtype in args.dtypes:
        part = report[dtype]
        print(
            f"{dtype}: {part['our_seconds']:.2f} s against {part['peer_seconds']:.2f} s "
            f"(ratio {part['speed_ratio']:.2f}), memory {part['memory_ratio']:.0%}, "
            f"{report['peak_share'][dtype]:.0%} of {part['matmul_gflops']:.0f} GFLOP/s"
        )
    print(f"each side's faster dtype: ratio {report['best_ratio']:.2f}")
    for name, part in report["breakdown"].items():
        print(f"  {name}: {part['seconds']:.3f} s, {part['peak_share']:.0%} of the peak")


if __name__ == "__main__":
    main()
