"""The rooms import each other only as the design allows."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "store": set(),
    "target": set(),
    "drafter": set(),
    "extract": {"store", "target"},
    "train": {"store", "drafter"},
    "evaluate": {"store", "target", "drafter"},
}


def rooms_imported_by(path: Path) -> set[str]:
    depth = len(path.relative_to(ROOT).parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found |= {name.split(".")[1] for name in names if name.startswith("dflash_pipeline.")}
    return found & (set(MAY_IMPORT) | {"cli", "examples"})


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_a_room_imports_only_the_rooms_it_may(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    for path in files:
        forbidden = rooms_imported_by(path) - MAY_IMPORT[room] - {room}
        assert not forbidden, f"{path.relative_to(ROOT)} imports {sorted(forbidden)}"


def test_help_does_not_import_torch() -> None:
    program = (
        "import sys; from click.testing import CliRunner; from dflash_pipeline.cli import main;"
        "result = CliRunner().invoke(main, ['--help']); assert result.exit_code == 0, result.output;"
        "heavy = {'torch', 'transformers', 'zarr', 'datasets'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_no_file_is_longer_than_400_lines() -> None:
    for path in ROOT.rglob("*.py"):
        if not any(part.startswith(".") or part == "build" for part in path.relative_to(ROOT).parts):
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path
