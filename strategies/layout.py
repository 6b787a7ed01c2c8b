"""Layouts: parallelisms on a mesh that they can spread over."""

from __future__ import annotations

from functools import cache
from itertools import product

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.composition.registry import kinds_of, layout_names, repaired_layout
from equivcheck.scenario import FSDP1, Execution, Layout, Parallelism
from equivcheck.scenario.mesh import MAX_RANKS
from equivcheck.strategies.chance import below
from equivcheck.strategies.execution import executions
from equivcheck.strategies.mesh import meshes_of
from equivcheck.strategies.parallelism import parallelisms_of

MAX_COMPILING_RANKS = 4
"""Most ranks of a layout that is compiled, or whose steps are traced."""

_EXECUTIONS = executions()


@st.composite
def layouts(
    draw: DrawFn,
    *,
    tags: tuple[str, ...] | None = None,
    max_ranks: int = MAX_RANKS,
    executions: SearchStrategy[Execution] = _EXECUTIONS,
) -> Layout:
    """Layouts of one parallelism or of several, equally often those with the names given (default: every one that exists).

    A layout is named by the tag of its parallelism, a composition as `Layout.name` writes it: `"fsdp2 x tensor_parallel"`.
    Options that do not go together are left out. A layout that is compiled or traced has 4 ranks at most: each does it for
    itself. Raises `UsageError` when drawn from, if a name does not exist.
    """
    kinds = kinds_of(draw(_names(tags)))
    parallelisms = tuple([draw(parallelisms_of(kind.parallelism.tag)) for kind in kinds])
    choices = _axes(parallelisms)
    names = choices[draw(below(len(choices)))]
    execution = draw(executions)
    most = min(max_ranks, MAX_COMPILING_RANKS) if execution.is_compiled or execution.whole_step else max_ranks
    return repaired_layout(Layout(mesh=draw(meshes_of(names, most)), parallelisms=parallelisms, execution=execution))


@cache
def _names(names: tuple[str, ...] | None) -> SearchStrategy[str]:
    return st.sampled_from(layout_names() if names is None else names)


def _axes(parallelisms: tuple[Parallelism, ...]) -> list[tuple[str, ...]]:
    """The alternatives of axes that fit the options of parallelisms: those of the innermost last, as they are neighbours."""
    alternatives = product(*(_axes_of(parallelism) for parallelism in reversed(parallelisms)))
    return [sum(names, start=()) for names in alternatives]


def _axes_of(parallelism: Parallelism) -> tuple[tuple[str, ...], ...]:
    if not isinstance(parallelism, FSDP1):
        return parallelism.axes
    return tuple(names for names in parallelism.axes if (len(names) == 2) == parallelism.strategy.is_hybrid)
