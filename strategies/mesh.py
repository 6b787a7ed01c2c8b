"""Meshes of ranks."""

from __future__ import annotations

import itertools
import math
from functools import cache

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.scenario import Axis, Mesh
from equivcheck.scenario.mesh import DP, MAX_RANKS, TP

MORE_OFTEN = {2: 6, 3: 2, 4: 3}
"""How many times more a shape comes, by the size of its largest axis."""


@st.composite
def meshes(draw: DrawFn, *, names: tuple[str, ...] = (DP,), max_ranks: int = MAX_RANKS) -> Mesh:
    """Meshes of 1 to `max_ranks` ranks over the named axes, of any sizes; fewer ranks are simpler."""
    return draw(meshes_of(names, max_ranks))


@cache
def meshes_of(names: tuple[str, ...], max_ranks: int) -> SearchStrategy[Mesh]:
    """What `meshes` draws from. Two, then four and three ranks along an axis come more often: most telling, and cheap to run."""
    shapes = [shape for shape in itertools.product(range(1, max_ranks + 1), repeat=len(names)) if math.prod(shape) <= max_ranks]
    # The second shape is tried whenever an example shrinks: it must take no more choices than others of two ranks (a plan does).
    inner = names.index(TP) if TP in names else None
    shapes.sort(key=lambda shape: (math.prod(shape), max(shape), 0 if inner is None else shape[inner]))
    shapes += [shape for shape in shapes for _ in range(MORE_OFTEN.get(max(shape), 0)) if min(shape) > 1]
    return st.sampled_from([Mesh(axes=tuple(map(_axis, names, shape))) for shape in shapes])


def _axis(name: str, size: int) -> Axis:
    return Axis(name=name, size=size)
