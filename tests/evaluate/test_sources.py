"""Figures by source add up to the whole, and samples show exactly the accepted drafts."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from dflash_pipeline.drafter.checkpoint import save_drafter
from dflash_pipeline.drafter.model import DFlashDrafter
from dflash_pipeline.drafter.walk import RowWalk, micro_tau
from dflash_pipeline.errors import CorpusError, TargetError
from dflash_pipeline.evaluate.baselines import TokenRow
from dflash_pipeline.evaluate.measure import FrozenHead, measure_pack
from dflash_pipeline.evaluate.offline import EvaluateConfig, run_evaluate
from dflash_pipeline.evaluate.render import render_evaluation
from dflash_pipeline.evaluate.sources import accepted_pieces, read_sources
from dflash_pipeline.store import Row, TargetHead


def corpus(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_figures_are_broken_down_by_the_source_of_the_rows_id(
    tmp_path: Path, drafter: DFlashDrafter, head: TargetHead, rows: list[Row], cache_dir: Path
) -> None:
    save_drafter(tmp_path / "drafter", drafter)
    lines = [{"id": f"row-{n}", "source": "seen" if n < 5 else "fresh"} for n in range(19)]
    file = corpus(tmp_path / "corpus.jsonl", [*lines, {"id": "another", "source": "elsewhere"}])
    config = EvaluateConfig(drafter=tmp_path / "drafter", cache=cache_dir, sources=(file,), device="cpu")
    result = run_evaluate(config, lambda _: None)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    walks = measure_pack(drafter, FrozenHead.of(head, drafter.fc.weight), rows).walks
    parts = {"seen": walks[:5], "fresh": walks[5:19], "no source": walks[19:]}
    assert list(result["sources"]) == ["fresh", "no source", "seen"]
    for name, mine in parts.items():
        found = result["sources"][name]
        assert (found["rows"], found["tau"]["micro"]) == (len(mine), micro_tau(mine))
    for key in ("rows", "tokens", "verifications"):
        assert sum(found[key] for found in result["sources"].values()) == result[key]
    stream = io.StringIO()
    render_evaluation({**result, "estimate": True}, Console(file=stream, width=140))
    line = next(line for line in stream.getvalue().splitlines() if "fresh" in line)
    assert "estimate" in line


def test_lines_without_an_id_are_named_as_extraction_names_them(tmp_path: Path) -> None:
    path = tmp_path / "math.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"source": "a"}\r\n\n{"source": "b"}\n{"id": 7, "source": "c"}\n{"id": "x"}\n')
    ids = ["math:1", "math:3", "7", "x", "unknown"]
    assert list(read_sources([path], ids).values()) == ["a", "b", "c", "no source", "no source"]


def test_files_that_hold_none_of_the_rows_are_refused(tmp_path: Path) -> None:
    path = corpus(tmp_path / "other.jsonl", [{"id": "a", "source": "s"}])
    with pytest.raises(CorpusError, match=r"none of the rows evaluated, such as 'row-0', is in these files"):
        read_sources([path], ["row-0"])
    path.write_text("not json\n")
    with pytest.raises(CorpusError, match=r"other\.jsonl:1: not JSON lines"):
        read_sources([path], ["row-0"])


class Letters:
    """A tokenizer of UTF-8 bytes: a token may be part of a character."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def test_pieces_join_to_the_reply_and_mark_exactly_the_accepted_drafts() -> None:
    reply = list(b"abcdefghij")
    row = TokenRow(np.array([1, 2, *reply]), np.arange(12) >= 2, 0)
    walk = RowWalk([2, 5, 6, 9], [2, 0, 2, 2], [3, 1, 3, 2])
    assert accepted_pieces(row, walk, Letters()) == [
        ["a", False],
        ["bc", True],
        ["de", False],  # the token after two accepted drafts, and that after none
        ["fg", True],
        ["h", False],
        ["ij", True],
    ]


def test_a_character_of_several_tokens_is_never_torn() -> None:
    reply = list("xé→y".encode())
    row = TokenRow(np.array(reply), np.ones(len(reply), dtype=bool), 0)
    walk = RowWalk([0, 2, 4], [1, 1, 2], [2, 2, 2])
    pieces = accepted_pieces(row, walk, Letters())
    assert "".join(piece for piece, _ in pieces) == "xé→y"
    assert "\ufffd" not in "".join(piece for piece, _ in pieces)


def test_samples_of_each_source_come_with_the_evaluation_and_are_shown(
    tiny_cache: Path, chat_corpus: Path, tmp_path: Path, drafter: DFlashDrafter, cache_dir: Path
) -> None:
    import torch

    from dflash_pipeline.drafter.config import DrafterConfig
    from dflash_pipeline.drafter.model import init_weights

    config = DrafterConfig(
        hidden_size=64, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=32, vocab_size=1024,
        block_size=4, mask_token_id=1010, context_layer_ids=(1, 2), num_target_layers=8,
        layer_types=("full_attention",),
    )  # fmt: skip
    model = DFlashDrafter(config)
    init_weights(model, torch.Generator().manual_seed(0))
    save_drafter(tmp_path / "drafter", model)
    lines = [json.loads(line) for line in chat_corpus.read_text().splitlines()]
    named = corpus(tmp_path / "named.jsonl", [{**row, "source": f"s{n % 2}"} for n, row in enumerate(lines)])
    options = EvaluateConfig(drafter=tmp_path / "drafter", cache=tiny_cache, sources=(named,), samples=2, device="cpu")
    result = run_evaluate(options, lambda _: None)
    assert sorted(sample["source"] for sample in result["samples"]) == ["s0", "s0", "s1", "s1"]
    replies = {row["id"]: row["messages"][-1]["content"] for row in lines}
    for sample in result["samples"]:
        assert "".join(piece for piece, _ in sample["pieces"]) == replies[sample["row"]] + "<|im_end|>"
    stream = io.StringIO()
    render_evaluation(result, Console(file=stream, width=140))
    assert "accepted drafts in ⟨⟩" in stream.getvalue()
    save_drafter(tmp_path / "other", drafter)
    with pytest.raises(TargetError, match="tokenizer cannot be loaded"):
        run_evaluate(EvaluateConfig(drafter=tmp_path / "other", cache=cache_dir, samples=1, device="cpu"), print)
