"""Strategies for layouts: parallelisms, a mesh to fit them, and how they are executed."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import product

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.layouts.composition.limits import repair_layout
from equivcheck.layouts.composition.registry import kinds_of, layout_names
from equivcheck.scenario import FSDP1, Axis, Checkpointing, Compile, Execution, Layout, Mesh, Parallelism
from equivcheck.scenario.mesh import DP, MAX_AXES, MAX_RANKS, TP
from equivcheck.strategies.chance import indices_below
from equivcheck.strategies.parallelism import parallelisms_of

MAX_COMPILING_RANKS = 4
"""Maximum ranks if the layout compiles or traces steps, because every rank compiles separately."""
TIMES_AS_OFTEN = {2: 20, 3: 6, 4: 8}
"""Weight of a mesh by its largest axis size. Larger sizes have weight 2, and a mesh with an axis of one rank has weight 1."""
FEW_RANKS = 4
"""Meshes with at most this number of ranks come twice as often. Eight ranks cost more than twice as much as two and show no more
faults. Meshes with three axes also come twice as often.
"""

NEVER: SearchStrategy[bool] = st.just(False)
IN_SIXTY: SearchStrategy[bool] = st.sampled_from((False,) * 59 + (True,))
"""Strategy for a boolean, True in one of 60 draws, because a compiled scenario costs as much as hundreds of other
scenarios."""
COMPILED: SearchStrategy[Execution] = st.sampled_from(
    (
        *(Execution(compile=Compile.AOT_EAGER),) * 4,
        *(Execution(compile=Compile.AOT_EAGER, per_layer=True),) * 3,
        *(Execution(compiled_autograd=True),) * 4,
        *(Execution(compile=Compile.AOT_EAGER, compiled_autograd=True),) * 4,
        Execution(compile=Compile.INDUCTOR),
    )
)
"""Strategy for executions that compile forward (entirely or by layer), backward, or both. One in sixteen uses Inductor, which
takes several times as long.
"""

_SELDOM = st.sampled_from((False,) * 19 + (True,))
"""Strategy for a boolean, True in one of 20 draws, because tracing a step costs as much as running ten steps."""
_CHECKPOINTINGS = st.sampled_from(
    (
        *(Checkpointing.NONE,) * 9,
        Checkpointing.ODD_LAYERS,
        Checkpointing.EVERY_LAYER,
        Checkpointing.SELECTIVE,
        Checkpointing.OFFLOAD,
    )
)
_IN_BACKWARD = st.sampled_from((False,) * 7 + (True,))
"""Half of the parallelisms cannot update in backward."""


@st.composite
def meshes(draw: DrawFn, *, names: tuple[str, ...] = (DP,), max_ranks: int = MAX_RANKS) -> Mesh:
    """Draw meshes with 1 to `max_ranks` ranks over the axes `names`. Examples shrink to fewer ranks."""
    return draw(meshes_of(names, max_ranks))


@cache
def meshes_of(names: tuple[str, ...], max_ranks: int) -> SearchStrategy[Mesh]:
    """Return the cached strategy behind `meshes`.

    Axes with two ranks, then four and three, come more often, because they show most for little time. An axis with one rank is
    rare, because errors along it do not show.
    """
    shapes = [shape for shape in product(range(1, max_ranks + 1), repeat=len(names)) if math.prod(shape) <= max_ranks]
    # Shrinking tries the second shape first, so it must take no more choices than other shapes with two ranks (a plan does).
    inner = names.index(TP) if TP in names else None
    shapes.sort(key=lambda shape: (math.prod(shape), max(shape), 0 if inner is None else shape[inner]))
    shapes += [shape for shape in shapes if min(shape) > 1 for _ in range(_times(shape) - 1)]
    return st.sampled_from(
        [Mesh(axes=tuple(Axis(name=name, size=size) for name, size in zip(names, shape, strict=True))) for shape in shapes]
    )


def _times(shape: tuple[int, ...]) -> int:
    # With 8 ranks, 2 x 2 x 2 is the only mesh whose three axes all have several ranks. 37 meshes have an axis of one rank.
    is_small_for_its_axes = math.prod(shape) <= FEW_RANKS or len(shape) == MAX_AXES
    return TIMES_AS_OFTEN.get(max(shape), 2) * (2 if is_small_for_its_axes else 1)


@st.composite
def executions(
    draw: DrawFn, *, compiles: SearchStrategy[bool] = NEVER, compiled: SearchStrategy[Execution] = COMPILED
) -> Execution:
    """Draw executions: a quarter use activation checkpointing or offload, an eighth update in backward, some trace steps.

    If `compiles` draws True, draw an execution from `compiled`.
    """
    execution = draw(compiled) if draw(compiles) else Execution(whole_step=draw(_SELDOM))
    return replace(execution, checkpointing=draw(_CHECKPOINTINGS), optimizer_in_backward=draw(_IN_BACKWARD))


_EXECUTIONS = executions()


@st.composite
def layouts(
    draw: DrawFn,
    *,
    tags: tuple[str, ...] | None = None,
    max_ranks: int = MAX_RANKS,
    executions: SearchStrategy[Execution] = _EXECUTIONS,
) -> Layout:
    """Draw layouts with one or several parallelisms. `tags` are the names of allowed layouts; by default, all are allowed.

    Half of the layouts are single parallelisms, because they show most faults at a fraction of the cost. A layout is named by its
    parallelism's tag; compositions are named as in `Layout.name`: `"fsdp2 x tensor_parallel"`. Options that exclude each other
    are dropped. Meshes have at most `max_ranks` ranks, and at most 4 if the layout compiles or traces. Drawing raises
    `UsageError` if a name does not exist.
    """
    kinds = kinds_of(draw(_names(tags)))
    parallelisms = tuple([draw(parallelisms_of(kind.parallelism.tag)) for kind in kinds])
    choices = _axes(parallelisms)
    names = choices[draw(indices_below(len(choices)))]
    execution = draw(executions)
    most = min(max_ranks, MAX_COMPILING_RANKS) if execution.is_compiled or execution.whole_step else max_ranks
    return repair_layout(Layout(mesh=draw(meshes_of(names, most)), parallelisms=parallelisms, execution=execution))


@cache
def _names(names: tuple[str, ...] | None) -> SearchStrategy[str]:
    """Draw names. Single parallelisms get half of the draws, and never less than twice their share."""
    chosen = layout_names() if names is None else names
    single = [name for name in chosen if len(kinds_of(name)) == 1]
    num_composed = len(chosen) - len(single)
    return st.sampled_from((*chosen, *single * max(1, round(num_composed / max(1, len(single))) - 1)))


def _axes(parallelisms: tuple[Parallelism, ...]) -> list[tuple[str, ...]]:
    """Return axis alternatives for these options. Axes of inner parallelisms come last, because their ranks are neighbours.

    HSDP around a pipeline of layers that are spread over ranks would need a fourth axis, which meshes do not have.
    """
    alternatives = product(*(_axes_of(parallelism) for parallelism in reversed(parallelisms)))
    return [names for names in (sum(each, start=()) for each in alternatives) if len(names) <= MAX_AXES]


def _axes_of(parallelism: Parallelism) -> tuple[tuple[str, ...], ...]:
    if not isinstance(parallelism, FSDP1):
        return parallelism.axes
    return tuple(names for names in parallelism.axes if (len(names) == 2) == parallelism.strategy.is_hybrid)
