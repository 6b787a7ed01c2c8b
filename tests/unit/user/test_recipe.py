"""Recipes: files that define a matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

from equivcheck import Matrix, UsageError
from equivcheck.user.recipe import defined_in

GOOD = """
import equivcheck
from beside import NAME
assert __name__ != "__main__"
anything = equivcheck.Matrix(
    model=print, batches=[1], loss=print, optimizer=print, layouts={NAME: {"mesh": {"dp": 2}, "parallelize": print}}
)
again = anything
"""
OTHER = """
other = equivcheck.Matrix(
    model=print, batches=[1], loss=print, optimizer=print, layouts={NAME: {"mesh": {"dp": 2}, "parallelize": print}}
)
"""


def test_a_recipe_defines_one_matrix(tmp_path: Path) -> None:
    """The matrix may have any name, and the file may import its neighbours."""
    tmp_path.joinpath("beside.py").write_text("NAME = 'a layout'")
    recipe = tmp_path / "recipe.py"
    recipe.write_text(GOOD)
    assert defined_in(recipe, Matrix).names == ("a layout",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1", "defines no Matrix. Expected exactly one"),
        (GOOD.replace("from beside import NAME", "NAME = 'a'") + OTHER, "defines 2 Matrix. Expected exactly one"),
        ("import equivcheck\n\nraise OSError('gone')", "raised OSError: gone (line 3)"),
        ("x = (", "raised SyntaxError: '(' was never closed"),
        ("import sys\nsys.exit(3)", "raised SystemExit: 3 (line 2)"),
        ("import equivcheck\nequivcheck.Matrix(layouts={})", "layouts {} is not valid"),
    ],
    ids=["none", "two", "raises", "syntax", "exit", "usage"],
)
def test_what_is_no_recipe_is_one_clear_line(tmp_path: Path, text: str, says: str) -> None:
    """The line says what the file does, and where."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(text)
    with pytest.raises(UsageError) as raised:
        defined_in(recipe, Matrix)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A file that is not Python is named, too."""
    with pytest.raises(UsageError, match=r"missing\.py cannot be read"):
        defined_in(tmp_path / "missing.py", Matrix)
    tmp_path.joinpath("recipe.txt").write_text("")
    with pytest.raises(UsageError, match="not a Python file"):
        defined_in(tmp_path / "recipe.txt", Matrix)
