"""Layouts: parallelisms on a mesh that they can spread over, and how they are run."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import product

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.layouts.composition.limits import repaired_layout
from equivcheck.layouts.composition.registry import kinds_of, layout_names
from equivcheck.scenario import FSDP1, Axis, Compile, Execution, Layout, Mesh, Parallelism, Recompute
from equivcheck.scenario.mesh import DP, MAX_RANKS, TP
from equivcheck.strategies.chance import below
from equivcheck.strategies.parallelism import parallelisms_of

MAX_COMPILING_RANKS = 4
"""Most ranks of a layout that is compiled, or whose steps are traced."""
TIMES_AS_OFTEN = {2: 20, 3: 6, 4: 8}
"""How often a shape comes, by the size of its largest axis; twice for larger ones, and once with an axis of one rank."""
FEW_RANKS = 4
"""Up to so many it comes twice as often as that: eight ranks cost more than twice what two do, and show no more faults."""

NEVER: SearchStrategy[bool] = st.just(False)
IN_SIXTY: SearchStrategy[bool] = st.sampled_from((False,) * 59 + (True,))
"""Once in 60: a compiled scenario costs as much as hundreds of others."""
COMPILED: SearchStrategy[Execution] = st.sampled_from(
    (
        *(Execution(compile=Compile.AOT_EAGER),) * 4,
        *(Execution(compile=Compile.AOT_EAGER, per_layer=True),) * 3,
        *(Execution(compiled_autograd=True),) * 4,
        *(Execution(compile=Compile.AOT_EAGER, compiled_autograd=True),) * 4,
        Execution(compile=Compile.INDUCTOR),
    )
)
"""Forward compiled as a whole or by layers, backward, both; one in sixteen by Inductor, which takes several times as long."""

_SELDOM = st.sampled_from((False,) * 19 + (True,))
"""Tracing a step costs as much as running ten."""
_CHECKPOINTINGS = st.sampled_from((Recompute.NONE,) * 6 + (Recompute.ODD_LAYERS, Recompute.EVERY_LAYER))


@st.composite
def meshes(draw: DrawFn, *, names: tuple[str, ...] = (DP,), max_ranks: int = MAX_RANKS) -> Mesh:
    """Meshes of 1 to `max_ranks` ranks over the named axes, of any sizes; fewer ranks are simpler."""
    return draw(meshes_of(names, max_ranks))


@cache
def meshes_of(names: tuple[str, ...], max_ranks: int) -> SearchStrategy[Mesh]:
    """What `meshes` draws from. Two, then four and three ranks along an axis come more often: most telling, and cheap to run.

    An axis of one rank comes seldom, as what is wrong along it does not show.
    """
    shapes = [shape for shape in product(range(1, max_ranks + 1), repeat=len(names)) if math.prod(shape) <= max_ranks]
    # The second shape is tried whenever an example shrinks: it must take no more choices than others of two ranks (a plan does).
    inner = names.index(TP) if TP in names else None
    shapes.sort(key=lambda shape: (math.prod(shape), max(shape), 0 if inner is None else shape[inner]))
    shapes += [shape for shape in shapes if min(shape) > 1 for _ in range(_times(shape) - 1)]
    return st.sampled_from([Mesh(axes=tuple(map(_axis, names, shape))) for shape in shapes])


def _times(shape: tuple[int, ...]) -> int:
    """How often a shape comes that has more than one rank along every axis."""
    return TIMES_AS_OFTEN.get(max(shape), 2) * (2 if math.prod(shape) <= FEW_RANKS else 1)


def _axis(name: str, size: int) -> Axis:
    return Axis(name=name, size=size)


@st.composite
def executions(
    draw: DrawFn, *, compiles: SearchStrategy[bool] = NEVER, compiled: SearchStrategy[Execution] = COMPILED
) -> Execution:
    """Executions, a quarter with activation checkpointing, some traced; one of `compiled` where `compiles` says so."""
    execution = draw(compiled) if draw(compiles) else Execution(whole_step=draw(_SELDOM))
    checkpointing = draw(_CHECKPOINTINGS)
    return execution if checkpointing is Recompute.NONE else replace(execution, checkpointing=checkpointing)


_EXECUTIONS = executions()


@st.composite
def layouts(
    draw: DrawFn,
    *,
    tags: tuple[str, ...] | None = None,
    max_ranks: int = MAX_RANKS,
    executions: SearchStrategy[Execution] = _EXECUTIONS,
) -> Layout:
    """Layouts of one parallelism or of several, of those with the names given (default: every one that exists).

    One parallelism comes twice as often as several: most faults are in one, and show there for a fraction of the cost.

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
    chosen = layout_names() if names is None else names
    return st.sampled_from((*chosen, *(name for name in chosen if len(kinds_of(name)) == 1)))


def _axes(parallelisms: tuple[Parallelism, ...]) -> list[tuple[str, ...]]:
    """The alternatives of axes that fit the options of parallelisms: those of the innermost last, as they are neighbours."""
    alternatives = product(*(_axes_of(parallelism) for parallelism in reversed(parallelisms)))
    return [sum(names, start=()) for names in alternatives]


def _axes_of(parallelism: Parallelism) -> tuple[tuple[str, ...], ...]:
    if not isinstance(parallelism, FSDP1):
        return parallelism.axes
    return tuple(names for names in parallelism.axes if (len(names) == 2) == parallelism.strategy.is_hybrid)
