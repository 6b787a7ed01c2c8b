"""Nouns, strategies and faces import no torch, and ARCHITECTURE.md names files that exist.

`lint-imports` holds the order of packages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = (
    *("equivcheck/scenario/", "equivcheck/programs/nouns/", "equivcheck/training/layers/"),
    *("strategies/", "equivcheck/cli/", "equivcheck/pytest_plugin.py"),
)
MODULES = ("module.py", "region.py", "sequence.py", "shape_ops.py")
"""Files of kinds of layers that are imported only to build a module."""
FILES = [
    path.relative_to(ROOT)
    for folder in ("equivcheck", "strategies")
    for path in sorted(ROOT.joinpath(folder).rglob("*.py"))
    if not path.is_relative_to(ROOT / "equivcheck/strategies")
]


def is_imported_early(file: Path) -> bool:
    """Whether a file must import no torch."""
    is_module = file.is_relative_to("equivcheck/training/layers") and file.name in MODULES
    return file.as_posix().startswith(WITHOUT_TORCH) and not is_module


def imported(file: Path) -> Iterator[str]:
    """The modules that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(ROOT.joinpath(file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            yield str(node.module)


@pytest.mark.parametrize("file", [file for file in FILES if is_imported_early(file)], ids=str)
def test_nouns_strategies_and_faces_import_no_torch(file: Path) -> None:
    """Help and generation stay quick, and strategies can be imported where torch is not."""
    assert not [module for module in imported(file) if module.split(".")[0] == "torch"]


def test_files_that_the_architecture_names_exist() -> None:
    """A path in ARCHITECTURE.md leads to a file or a folder, from the root or from the package."""
    text = ROOT.joinpath("ARCHITECTURE.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_0-9]+(?:/[a-z_0-9.]*)+|[a-z_]+\.py)`", text)
    assert len(named) > 10
    assert [path for path in named if not any(ROOT.joinpath(base, path).exists() for base in ("", "equivcheck"))] == []
