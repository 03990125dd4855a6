"""Progress goes to stderr: tokens a second, time left, share of padding."""

from __future__ import annotations

import pytest

from dflash_pipeline.extract import RichProgress


def test_lines_go_to_stderr_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = RichProgress()
    progress.notice("a notice with [brackets] stays as it is")
    progress.start(1000, 400)
    progress.advance(100, 25)
    progress.advance(500, 75)
    progress.stop()
    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    assert lines[0] == "a notice with [brackets] stays as it is"
    assert lines[-1].startswith("extract 1,000/1,000 tokens, ")
    assert "tokens/s, 14% padding, 0 s left" in lines[-1]


def test_stop_needs_no_start(capsys: pytest.CaptureFixture[str]) -> None:
    RichProgress().stop()
    assert capsys.readouterr().err == ""
