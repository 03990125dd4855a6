from __future__ import annotations

import errno
from pathlib import Path

import pytest

from dflash_pipeline.errors import DflashError
from dflash_pipeline.store import durable
from dflash_pipeline.store.durable import commit_dir, explained, make_temporary_dir, remove_stale, write_atomic


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(durable.os, "fsync", fail)
    with pytest.raises(OSError, match="broken disk"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_folder_is_committed_whole_over_nothing(tmp_path: Path) -> None:
    temporary = make_temporary_dir(tmp_path, "final")
    (temporary / "a").mkdir()
    (temporary / "a/b").write_bytes(b"x")
    (temporary / "a/b").chmod(0o600)
    commit_dir(temporary, tmp_path / "final")
    assert (tmp_path / "final/a/b").read_bytes() == b"x"
    assert not temporary.exists()
    again = make_temporary_dir(tmp_path, "final")
    with pytest.raises(OSError, match="not empty"):
        commit_dir(again, tmp_path / "final")


def test_only_what_a_writer_left_is_stale(tmp_path: Path) -> None:
    make_temporary_dir(tmp_path, "x")
    (tmp_path / ".tmp-file").write_bytes(b"")
    (tmp_path / "kept").mkdir()
    remove_stale(tmp_path)
    remove_stale(tmp_path / "nowhere")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_what_another_writer_is_writing_is_not_stale(tmp_path: Path) -> None:
    mine, other = make_temporary_dir(tmp_path, "00001"), make_temporary_dir(tmp_path, "00010")
    longer = make_temporary_dir(tmp_path, "000012")
    remove_stale(tmp_path, "00001")
    assert not mine.exists()
    assert other.is_dir()
    assert longer.is_dir()


@pytest.mark.parametrize(
    ("code", "message"),
    [(errno.ENOSPC, "no space left"), (errno.EROFS, "cannot be written"), (errno.EACCES, "cannot be written")],
)
def test_what_the_user_can_mend_is_explained(code: int, message: str) -> None:
    with pytest.raises(DflashError, match=message), explained(Path("c")):
        raise OSError(code, "text")


def test_other_errors_pass() -> None:
    with pytest.raises(OSError, match="text"), explained(Path("c")):
        raise OSError(errno.EIO, "text")
