"""Does serving earn the tau that the offline walk promises? vLLM's own counters beside it.

Starts `vllm serve` with an exported drafter (method "dflash"), lets it answer prompts greedily, reads its counters of
accepted drafts, then extracts the rows that vLLM wrote and walks them offline. Prints one JSON object with both.

    python benchmarks/vllm_counters.py --vllm VENV/bin/vllm --target MODEL --drafter EXPORT --prompts P.jsonl --out DIR

DIR gets rows.jsonl (what vLLM wrote), counters.json, server.log and cache/; what is there already is used again, so
that an interrupted comparison goes on. The server's counters know nothing of a row's end: they count drafts accepted
beyond the end token, which the walk does not, so that the two may differ by a row's last block each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_pipeline.evaluate.offline import EvaluateConfig, run_evaluate
from dflash_pipeline.extract.config import ExtractConfig
from dflash_pipeline.extract.progress import RichProgress
from dflash_pipeline.extract.run import run_extract

COUNTER = re.compile(r"^vllm:spec_decode_num_(\w+?)(?:_total)?\{(.*?)\}\s+(\S+)$")
START_SECONDS = 3600


def main() -> None:
    """Serve, count, walk, compare."""
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    rows, counters = options.out / "rows.jsonl", options.out / "counters.json"
    if not counters.is_file():
        with server(options):
            before = read_counters(options.port)
            seconds = answer_all(options, rows)
            after = read_counters(options.port)
        counted = {key: after[key] - before.get(key, 0.0) for key in after}
        counters.write_text(json.dumps({"counters": counted, "seconds": seconds}), encoding="utf-8")
    run_extract(
        ExtractConfig(corpus=(rows,), target=str(options.target), out=options.out / "cache", dtype=options.dtype),
        RichProgress(),
    )
    offline = run_evaluate(
        EvaluateConfig(drafter=options.drafter, cache=options.out / "cache", split="all"), print_line
    )
    print(json.dumps(comparison(json.loads(counters.read_text(encoding="utf-8")), offline), indent=2))


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare vLLM's acceptance counters with the offline walk.")
    parser.add_argument("--vllm", type=Path, required=True, help="the vllm command")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True, help="folder that dflash export wrote")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with prompt_ids")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=224)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--dtype", default="bfloat16", help="of the served and of the extracted target")
    return parser.parse_args()


def print_line(line: str) -> None:
    """Progress, apart from the result."""
    print(line, flush=True)


@contextmanager
def server(options: argparse.Namespace) -> Iterator[None]:
    """Run `vllm serve` until the block ends."""
    block_size = json.loads((options.drafter / "config.json").read_text(encoding="utf-8"))["block_size"]
    speculative = {"method": "dflash", "model": str(options.drafter), "num_speculative_tokens": block_size - 1}
    command = [
        *(str(options.vllm), "serve", str(options.target), "--host", "127.0.0.1", "--port", str(options.port)),
        *("--max-model-len", "2048", "--dtype", options.dtype, "--enforce-eager"),
        *("--speculative-config", json.dumps(speculative)),
    ]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    settings["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = str(START_SECONDS)  # a slow processor is no hanging one
    with (options.out / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **settings}, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until_healthy(process, options.port, options.out / "server.log")
            yield
        finally:
            process.terminate()
            process.wait(timeout=60)


def wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait for the server to answer. SystemExit where it dies or takes longer than START_SECONDS."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"vllm ended with {process.returncode}: see {log}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(2)
    raise SystemExit(f"vllm did not answer within {START_SECONDS} s: see {log}")


def read_counters(port: int) -> dict[str, float]:
    """Return the server's speculative counters: drafts, draft_tokens, accepted_tokens, and by position."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if match := COUNTER.match(line):
            name, labels, value = match.groups()
            position = re.search(r'position="(\d+)"', labels)
            found[f"{name}_{position[1]}" if position else name] = float(value)
    return found


def answer_all(options: argparse.Namespace, out: Path) -> float:
    """Let the server answer all prompts greedily; write the rows, return the seconds."""
    lines = options.prompts.read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line) for line in lines[: options.rows]]
    started = time.perf_counter()

    def answer(prompt: dict[str, Any]) -> dict[str, Any]:
        body = {"prompt": prompt["prompt_ids"], "max_tokens": options.max_tokens, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{options.port}/v1/completions",
            json.dumps({"model": str(options.target), "return_token_ids": True, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=3600) as reply:
            choice = json.loads(reply.read())["choices"][0]
        row = {"id": prompt["id"], "source": prompt.get("source"), "prompt_ids": prompt["prompt_ids"]}
        return {**row, "completion_ids": choice["token_ids"], "finish_reason": choice["finish_reason"]}

    with ThreadPoolExecutor(options.concurrency) as pool:
        rows = list(pool.map(answer, prompts))
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return time.perf_counter() - started


def comparison(served: dict[str, Any], offline: dict[str, Any]) -> dict[str, Any]:
    """Put the mean acceptance length (accepted drafts + 1 per verification) and the rates by position side by side."""
    counters = served["counters"]
    drafts = counters["drafts"]
    rates = [counters[f"accepted_tokens_per_pos_{slot}"] / drafts for slot in range(len(offline["acceptance_rate"]))]
    serving, walked = 1 + counters["accepted_tokens"] / drafts, 1 + sum(offline["acceptance_rate"])
    return {
        "rows": offline["rows"],
        "verifications": {"vllm": int(drafts), "offline": offline["verifications"]},
        "acceptance_length": {"vllm": serving, "offline": walked, "difference": serving / walked - 1},
        "acceptance_rate": {"vllm": rates, "offline": offline["acceptance_rate"]},
        "largest_difference_of_rates": max(
            abs(one - two) for one, two in zip(rates, offline["acceptance_rate"], strict=True)
        ),
        "offline_tau": offline["tau"],
        "on_policy_share": offline["on_policy_share"],
        "serving_seconds": served["seconds"],
    }


if __name__ == "__main__":
    main()
