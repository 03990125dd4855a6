"""What a power cut would find: the order in which a cache is written, flushed and renamed, as the system sees it.

Killing a process does not test this: what it wrote stays in the system's memory.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("synthetic", sys.argv[1])
synthetic = importlib.util.module_from_spec(spec)
spec.loader.exec_module(synthetic)
synthetic.write_cache(Path(sys.argv[2]))
"""
CALL = re.compile(
    r"^(?:\d+ +)?(?:(?P<flush>fsync|fdatasync)\(\d+<(?P<flushed>[^>]*)>"
    r"|(?:write|pwrite64)\(\d+<(?P<written>[^>]*)>"
    r'|(?:rename(?:at2?)?|link(?:at)?)\((?:AT_FDCWD(?:<[^>]*>)?, )?"(?P<old>[^"]*)", '
    r'(?:AT_FDCWD(?:<[^>]*>)?, )?"(?P<new>[^"]*)")'
)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, Path, Path | None]]]:
    """The cache's folder, and what was done in it: ("write" or "flush", path, None) and ("rename", old, new)."""
    folder = tmp_path_factory.mktemp("order")
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    if subprocess.run(["strace", "-o", folder / "try", "true"], capture_output=True, check=False).returncode:
        pytest.skip("strace may not trace here")
    calls = "trace=write,pwrite64,fsync,fdatasync,rename,renameat,renameat2,link,linkat"
    program = [sys.executable, "-c", PROGRAM, Path(__file__).with_name("synthetic.py"), folder / "cache"]
    subprocess.run(["strace", "-f", "-y", "-s", "300", "-o", folder / "log", "-e", calls, *program], check=True)
    events: list[tuple[str, Path, Path | None]] = []
    for line in (folder / "log").read_text(errors="replace").splitlines():
        found = CALL.match(line)
        if found is None or str(folder) not in line:
            continue
        if found["flush"]:
            events.append(("flush", Path(found["flushed"]), None))
        elif found["written"]:
            events.append(("write", Path(found["written"]), None))
        elif (
            "/.tmp-" in found["new"]
        ):  # safetensors and zarr write beside and rename (or link) too, inside a temporary folder
            old, new = Path(found["old"]), Path(found["new"])
            events = [(kind, new if path == old else path, other) for kind, path, other in events]
        else:
            events.append(("rename", Path(found["old"]), Path(found["new"])))
    return folder / "cache", events


def test_everything_is_flushed_before_its_rename_and_the_folder_after(
    trace: tuple[Path, list[tuple[str, Path, Path | None]]],
) -> None:
    cache, events = trace
    renames = [(place, old, new) for place, (kind, old, new) in enumerate(events) if kind == "rename"]
    assert renames
    for place, old, new in renames:
        assert new is not None
        written = {path for kind, path, _ in events[:place] if kind == "write" and (path == old or old in path.parents)}
        assert written, new
        for path in written:
            last = max(index for index in range(place) if events[index][:2] == ("write", path))
            assert ("flush", path, None) in events[last:place], f"{path} is renamed before it is flushed"
        for directory in {
            parent for path in written for parent in path.parents if parent == old or old in parent.parents
        }:
            assert ("flush", directory, None) in events[:place], f"{directory} is renamed before it is flushed"
        following = [event for event in events[place + 1 :] if event[0] != "write"]
        assert following[0] == ("flush", new.parent, None), f"{new.parent} is not flushed after {new} came into it"
        late = [path for kind, path, _ in events[place:] if kind == "write" and (path == new or new in path.parents)]
        assert not late, f"{new} is written to after it came into its place"
    assert ("flush", cache.parent, None) in events, "the folder that the cache was made in is never flushed"


def test_the_plan_comes_first_and_the_manifest_last(
    trace: tuple[Path, list[tuple[str, Path, Path | None]]],
) -> None:
    cache, events = trace
    names = [new.relative_to(cache).as_posix() for kind, _, new in events if kind == "rename" and new is not None]
    shards = [f"shards/{shard:05d}" for shard in range(4)]
    assert names == ["plan.json", "target", *shards, "stats.safetensors", "manifest.json"]
    written = {path for kind, path, _ in events if kind == "write"}
    assert {path.relative_to(cache).parts[-1] for path in written if ".tmp-" not in path.as_posix()} <= {".lock"}
