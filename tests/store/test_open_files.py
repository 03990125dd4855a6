"""How many files are opened before the first training step: as many for 3,000 rows as for 300.

Counted by strace, which sees every thread and library; where there is none, by Python's own audit hook.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from dflash_pipeline.store import CacheWriter, Row

MARKER = "/the-first-training-step"
PROGRAM = f"""
import os, sys
from dflash_pipeline.cli import main
from dflash_pipeline.train import loop
opened = []
if sys.argv[3] == "audit":
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)

def first_step(*_):
    os.path.exists({MARKER!r})
    print("\\n".join(f'openat("{{name}}") = 3' for name in opened))
    sys.stdout.flush()
    os._exit(0)

loop.Trainer.step = first_step
settings = ["steps=3", "heldout_share=0", "shuffle_tokens=320", "pack_tokens=64", "anchors_per_pack=8", "num_layers=1",
            "mask_token_id=49"]
words = [word for setting in settings for word in ("--set", setting)]
main(["train", "--cache", sys.argv[1], "--out", sys.argv[2], "--num-workers", "0", "--device", "cpu", *words])
"""
CONFIG = {
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 16,
    "num_hidden_layers": 8, "max_position_embeddings": 64, "hidden_size": 8,
}  # fmt: skip


def write_many(synthetic: ModuleType, path: Path, num_rows: int) -> int:
    """Write a cache of rows of eight tokens, twenty to a shard; return the number of its files."""
    rows = []
    for index, row in enumerate(synthetic.make_rows([8] * 20) * (num_rows // 20)):
        rows.append(Row(**{**vars(row), "id": f"row-{index}", "tokens": row.tokens.clamp(max=48)}))
    plan, ordered = synthetic.make_plan(rows, synthetic.identity(shard_tokens=160))

    def target_files(directory: Path) -> None:
        (directory / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")

    with CacheWriter.create_or_resume(path, plan, synthetic.make_head(), target_files, {}) as writer:
        synthetic.write_missing(writer, ordered)
        manifest = writer.finish()
    assert (manifest.num_shards, manifest.num_rows) == (num_rows // 20, num_rows)
    return sum(file.is_file() for file in path.rglob("*"))


def files_opened(cache: Path, run: Path) -> list[str]:
    """Return the files of the cache that are opened before the first step, one entry per opening."""
    strace, log = shutil.which("strace"), run.with_suffix(".strace")
    command = [sys.executable, "-c", PROGRAM, str(cache), str(run), "strace" if strace else "audit"]
    if strace:
        command = [strace, "-f", "-qq", "-e", "trace=open,openat,openat2,stat,newfstatat,statx", "-o", log, *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = log.read_text(encoding="utf-8", errors="replace") if strace else done.stdout + MARKER
    before, marker, _ = text.partition(MARKER)
    assert marker, "the first step was not reached"
    found = re.findall(r'open(?:at2?)?\((?:AT_FDCWD, )?"([^"]+)".* = \d+$', before, re.MULTILINE)
    return [name.removeprefix(f"{cache}/") for name in found if name.startswith(f"{cache}/")]


def test_the_files_opened_before_the_first_step_do_not_grow_with_the_corpus(
    synthetic: ModuleType,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # thousands of files, and no power cut
    opened, files = {}, {}
    for num_rows in (300, 3000):
        cache = tmp_path / f"c{num_rows}"
        files[num_rows] = write_many(synthetic, cache, num_rows)
        opened[num_rows] = files_opened(cache, tmp_path / f"run{num_rows}")
    assert files[3000] > 5 * files[300]
    assert {name.split("/")[0] for name in opened[3000]} == {
        *("manifest.json", "plan.json", "shards", "stats.safetensors", "target")
    }
    shards = {name.split("/")[1] for name in opened[3000] if name.startswith("shards/")}
    assert len(shards) == 2  # a window of 320 tokens
    assert len(opened[3000]) == len(opened[300]) < 60
    record_property("files_opened", len(opened[3000]))
