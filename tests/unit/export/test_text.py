"""Broken lines keep their meaning."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equivcheck.layouts.base.script.text import WIDTH, break_line, call, format_code

NAMES = st.sampled_from(["values", "model.get_submodule", "a" * 30, "torch.optim.SGD"])
ATOMS = st.one_of(
    NAMES, st.floats(allow_nan=False, allow_infinity=False).map(repr), st.sampled_from(['"a, (b"', "'[x'", 'f"{a} {b}"'])
)


def _composed(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    several = st.lists(inner, min_size=1, max_size=6)
    return st.one_of(
        st.builds(lambda name, items: f"{name}({', '.join(items)})", NAMES, several),
        several.map(lambda items: f"[{', '.join(items)}]"),
        several.map(lambda items: "{" + ", ".join(f'"{index}": {item}' for index, item in enumerate(items)) + "}"),
        st.builds(lambda item, source: f"[{item} for one, other in {source} if one not in {source}]", inner, NAMES),
    )


@given(st.recursive(ATOMS, _composed, max_leaves=25), st.integers(0, 3))
def test_a_broken_line_says_the_same(expression: str, levels: int) -> None:
    """With any nesting, the parts parse to the same code, and are no wider than necessary."""
    lines = break_line(f"{'    ' * levels}left = {expression}")

    assert ast.dump(ast.parse("\n".join(lines).strip())) == ast.dump(ast.parse(f"left = {expression}"))
    assert all(
        len(line) <= WIDTH or not any(bracket in line.rstrip(",")[:-1] for bracket in "([{")
        for line in lines
        if " for " not in line
    )


@pytest.mark.parametrize("line", ["x = 1", "# " + "a " * 80, "x = " + "a" * 120])
def test_a_line_that_fits_or_cannot_be_broken_stays(line: str) -> None:
    """Comments and long names are left alone."""
    assert break_line(line) == [line]


def test_numbers_share_lines() -> None:
    """A long row of numbers takes few lines."""
    lines = break_line(f"row = [{', '.join(['0.125'] * 40)}]")

    assert len(lines) == 6
    assert ast.literal_eval("".join(lines).removeprefix("row = ")) == [0.125] * 40


def test_a_call_leaves_out_what_is_none() -> None:
    """Strings are code, None is left out, other values are written as literals."""
    assert call("f", "x", mesh="mesh", flag=True, rate=0.5, nothing=None) == "f(x, mesh=mesh, flag=True, rate=0.5)"
    assert format_code(["a", ""]) == "a\n\n"
