"""What the error types' room says in messages."""

from __future__ import annotations

from dflash_pipeline.errors import counted


def test_one_is_singular_and_thousands_have_a_comma() -> None:
    assert [counted(number, "row") for number in (0, 1, 2, 1234)] == ["0 rows", "1 row", "2 rows", "1,234 rows"]
    assert [counted(number, "reply", "replies") for number in (1, 2)] == ["1 reply", "2 replies"]
