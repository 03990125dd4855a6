"""Live decoding against the offline walk over what it wrote, row by row, on a real target.

    python benchmarks/live_rows.py --target MODEL --drafter DRAFTER --prompts P.jsonl --out DIR [--rows 60]
        [--max-new-tokens 224] [--dtype float32] [--tree-budget N]...

Decodes with and without the drafter, extracts the rows that were saved, walks them offline, and prints one JSON object:
whether the text was that of plain decoding, both taus, and the rows whose numbers of verifications differ. In float32
there must be none. DIR gets live.json, rows.jsonl and cache/; what is there already is used again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dflash_pipeline.drafter.checkpoint import load_drafter
from dflash_pipeline.evaluate.live import LiveConfig, run_live
from dflash_pipeline.evaluate.locate import locate_drafter
from dflash_pipeline.evaluate.measure import FrozenHead, measure_pack
from dflash_pipeline.evaluate.offline import EvaluateConfig, run_evaluate
from dflash_pipeline.extract.config import ExtractConfig
from dflash_pipeline.extract.progress import RichProgress
from dflash_pipeline.extract.run import run_extract
from dflash_pipeline.store import open_cache


def main() -> None:
    """Decode, extract, walk, compare."""
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    rows, found = options.out / "rows.jsonl", options.out / "live.json"
    if not found.is_file():
        config = LiveConfig(
            drafter=options.drafter,
            target=str(options.target),
            prompts=options.prompts,
            rows=options.rows,
            max_new_tokens=options.max_new_tokens,
            dtype=options.dtype,
            tree_budgets=tuple(options.tree_budget),
            save_rows=rows,
        )
        found.write_text(json.dumps(run_live(config, print_line)), encoding="utf-8")
    live = json.loads(found.read_text(encoding="utf-8"))
    cache = options.out / "cache"
    run_extract(
        ExtractConfig(corpus=(rows,), target=str(options.target), out=cache, dtype=options.dtype), RichProgress()
    )
    offline = run_evaluate(
        EvaluateConfig(drafter=options.drafter, cache=cache, split="all", tree_budgets=tuple(options.tree_budget)),
        print_line,
    )
    print(json.dumps(comparison(live, offline, differing_rows(rows, cache, options.drafter)), indent=2))


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare live decoding with the offline walk over its rows.")
    for name in ("--target", "--drafter", "--prompts", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--max-new-tokens", type=int, default=224)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tree-budget", type=int, action="append", default=[])
    return parser.parse_args()


def print_line(line: str) -> None:
    """Progress, apart from the result."""
    print(line, flush=True)


def differing_rows(saved: Path, cache_path: Path, drafter_path: Path) -> dict[str, list[int]]:
    """Return verifications live and offline of the rows where the two differ."""
    live = {row["id"]: row["verifications"] for row in map(json.loads, saved.read_text(encoding="utf-8").splitlines())}
    cache, drafter = open_cache(cache_path), load_drafter(locate_drafter(drafter_path))
    head = FrozenHead.of(cache.head(), drafter.model.fc.weight)
    different = {}
    for index, name in enumerate(cache.row_ids):
        walk = measure_pack(drafter.model, head, [cache.read_row(index)]).walks[0]
        if walk.verifications != live[name]:
            different[name] = [live[name], walk.verifications]
    return different


def comparison(live: dict[str, Any], offline: dict[str, Any], different: dict[str, list[int]]) -> dict[str, Any]:
    """Put both sides together."""
    return {
        "rows": live["rows"],
        "tokens": live["tokens"],
        "lossless": live["lossless"],
        "differences": live["differences"],
        "tau": {"live": live["tau"], "offline": offline["tau"]},
        "verifications": {"live": live["verifications"], "offline": offline["verifications"]},
        "rows_with_other_verifications": different,
        "speedup": live["speedup"],
        "tokens_per_second": live["tokens_per_second"],
        "baseline_tokens_per_second": live["baseline_tokens_per_second"],
        "tree": {
            budget: {
                "lossless": tree["lossless"],
                "live": tree["tau"]["micro"],
                "offline": offline["tree"][budget]["tau"]["micro"],
                "speedup": tree["speedup"],
            }
            for budget, tree in live["tree"].items()
        },
        "top_m_tau": offline["top_m_tau"],
        "on_policy_share": offline["on_policy_share"],
    }


if __name__ == "__main__":
    main()
