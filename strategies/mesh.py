"""Meshes of ranks."""

from __future__ import annotations

import itertools
import math
from functools import cache

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.scenario import Axis, Mesh
from equivcheck.scenario.mesh import DP, MAX_RANKS


@st.composite
def meshes(draw: DrawFn, *, names: tuple[str, ...] = (DP,), max_ranks: int = MAX_RANKS) -> Mesh:
    """Meshes of 1 to `max_ranks` ranks over the named axes, of any sizes; fewer ranks are simpler."""
    return draw(meshes_of(names, max_ranks))


@cache
def meshes_of(names: tuple[str, ...], max_ranks: int) -> SearchStrategy[Mesh]:
    """What `meshes` draws from. Shapes of 2 to 4 ranks an axis come three times: the most telling and the cheapest to run."""
    shapes = [shape for shape in itertools.product(range(1, max_ranks + 1), repeat=len(names)) if math.prod(shape) <= max_ranks]
    shapes.sort(key=lambda shape: (math.prod(shape), max(shape)))
    shapes += 2 * [shape for shape in shapes if min(shape) > 1 and max(shape) <= 4]
    return st.sampled_from([Mesh(axes=tuple(map(_axis, names, shape))) for shape in shapes])


def _axis(name: str, size: int) -> Axis:
    return Axis(name=name, size=size)
