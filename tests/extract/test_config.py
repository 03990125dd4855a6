"""Settings are checked before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_pipeline.errors import DflashError
from dflash_pipeline.extract import ExtractConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": 0}, "max_length 0: expected at least 1"),
        ({"batch_tokens": 0}, "batch_tokens 0"),
        ({"shard_tokens": -5}, "shard_tokens -5"),
        ({"top_k": 0}, "top_k 0"),
        ({"limit_rows": 0}, "limit_rows 0"),
        ({"limit_tokens": 0}, "limit_tokens 0"),
        ({"codec": "q8"}, "codec 'q8' is not one of: lossless"),
        ({"dtype": "float16"}, "dtype 'float16': expected one of bfloat16, float32"),
        ({"device": "abacus"}, "device 'abacus'"),
        ({"lease_seconds": 0.0}, "lease_seconds 0: expected 0.1 to 3600"),
        ({"rank": 2, "world_size": 2}, "rank 2: expected 0 to 1"),
        ({"work": Path("w")}, "work w: only an output in a bucket"),
        ({"out": "s3://bucket/c", "append": True}, "s3://bucket/c: --append extends a folder"),
        ({"target": ""}, "has no name"),
    ],
)
def test_values_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DflashError, match=message):
        ExtractConfig(**{"corpus": (Path("a.jsonl"),), "target": "t", "out": Path("c"), **changes})
