"""The import rule of ARCHITECTURE.md: a room imports only from rooms above it, and the nouns and strategies import no torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import equivcheck

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (`.+?`) \|", re.MULTILINE)
ROOMS: list[tuple[str, ...]] = [
    tuple(re.findall(r"`([^`]+)`", cell)) for cell in ROW.findall(ROOT.joinpath("ARCHITECTURE.md").read_text(encoding="utf-8"))
]
"""The paths of each room, top floor of the table first."""
FILES = [
    path.relative_to(ROOT)
    for folder in ("equivcheck", "strategies")
    for path in sorted(ROOT.joinpath(folder).rglob("*.py"))
    if not path.is_relative_to(ROOT / "equivcheck/strategies")
]
WITHOUT_TORCH = (
    *("equivcheck/scenario/", "equivcheck/tensor_program/", "equivcheck/layers/"),
    *("strategies/", "equivcheck/cli/", "equivcheck/pytest_plugin.py"),
)
MODULES = ("module.py", "region.py", "sequence.py", "shape_ops.py")
"""Of kinds of layers, what is imported only to build a module."""


def floor(path: str) -> int:
    """The row of the table that a path of this tree belongs to."""
    (row,) = [number for number, paths in enumerate(ROOMS) if any(path == room or path.startswith(room) for room in paths)]
    return row


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The modules that a file imports, wherever in it, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            yield from ((module_of(str(node.module), alias.name), node.lineno) for alias in node.names)


def module_of(package: str, name: str) -> str:
    """The module behind ``from package import name``; a public name of the package counts as where it lives."""
    if package == "equivcheck" and name in equivcheck._HOMES:
        return equivcheck._HOMES[name]
    return f"{package}.{name}" if path_of(f"{package}.{name}") else package


def path_of(module: str) -> str | None:
    """The file of a module of this tree."""
    base = module.replace(".", "/").replace("equivcheck/strategies", "strategies")
    return next((path for path in (f"{base}.py", f"{base}/__init__.py") if (ROOT / path).is_file()), None)


def is_imported_early(file: Path) -> bool:
    """Whether a file belongs to what is to import no torch."""
    is_module = file.is_relative_to("equivcheck/layers") and file.name in MODULES
    return file.as_posix().startswith(WITHOUT_TORCH) and not is_module


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_room_imports_only_from_rooms_above_it(file: Path) -> None:
    """A file may import from its own room and those above, inside functions and for types as well."""
    here = floor(file.as_posix())
    for module, line in imported(ast.parse(ROOT.joinpath(file).read_text(encoding="utf-8"))):
        path = path_of(module)
        # `import equivcheck` alone is for its version: everything else in it is imported when it is asked for.
        if path is not None and module != "equivcheck":
            assert floor(path) <= here, f"{file}:{line} imports {module}, a room below its own"


@pytest.mark.parametrize("file", [file for file in FILES if is_imported_early(file)], ids=str)
def test_what_is_imported_early_names_no_torch(file: Path) -> None:
    """Nouns, strategies and faces mention no torch, not even inside functions."""
    found = imported(ast.parse(ROOT.joinpath(file).read_text(encoding="utf-8")))
    assert not [f"{file}:{line}" for module, line in found if module.split(".")[0] == "torch"]


@pytest.mark.parametrize("room", [path for paths in ROOMS for path in paths])
def test_every_room_is_there(room: str) -> None:
    """The table names what exists."""
    assert ROOT.joinpath(room).exists()
    assert ROOT.joinpath(room).is_dir() == room.endswith("/")


def test_files_that_the_text_names_are_there() -> None:
    """A path in ARCHITECTURE.md leads to a file, from the root or from the package."""
    text = ROOT.joinpath("ARCHITECTURE.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_0-9/]+\.(?:py|toml|json))`", text)
    assert len(named) > 20
    assert [path for path in named if not any(ROOT.joinpath(base, path).is_file() for base in ("", "equivcheck"))] == []
