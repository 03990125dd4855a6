from __future__ import annotations

from pathlib import Path

import pytest

from dflash_pipeline.errors import CacheCorrupt
from dflash_pipeline.store.layout import safe_join, shard_name


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "..", "a/../b", "./a", "a//b", "a/", "a\\b", "C:/x", "a\0b", "../shards/0/x"]
)
def test_a_path_that_could_leave_the_cache_is_refused(path: str) -> None:
    with pytest.raises(CacheCorrupt, match="plain path"):
        safe_join(Path("cache"), path)


def test_a_plain_path_is_joined() -> None:
    assert safe_join(Path("cache"), "states/1/c/0/0") == Path("cache/states/1/c/0/0")


def test_shard_names_sort_and_outgrow_five_digits() -> None:
    assert [shard_name(shard) for shard in (0, 42, 123456)] == ["00000", "00042", "123456"]
