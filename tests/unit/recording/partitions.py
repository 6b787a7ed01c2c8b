"""Partitions of a tensor, as parallelisms make them."""

from __future__ import annotations

import itertools
import math

from hypothesis import strategies as st

from equivcheck.worlds.trace.trace import Piece

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple) | st.sampled_from(
    [(300,), (5000,), (70, 33), (70, 90), (5, 600), (600, 5)]
)


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...], name: str = "weight") -> list[Piece]:
    """Boxes along any dims, as DTensor makes them, each of them whole or in runs, as FSDP1's flat parameters make them."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 3))) if shape else ():
        at, dim = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, len(shape) - 1))
        start, size = boxes.pop(at)
        cut = draw(st.integers(0, size[dim]))
        for first, count in ((0, cut), (cut, size[dim] - cut)):
            boxes.append(
                (
                    tuple(each + first * (axis == dim) for axis, each in enumerate(start)),
                    tuple(count if axis == dim else each for axis, each in enumerate(size)),
                )
            )
    pieces = []
    for start, size in boxes:
        box = Piece(name=name, shape=shape) if size == shape else Piece(name=name, shape=shape, start=start, size=size)
        cuts = sorted(draw(st.lists(st.integers(0, math.prod(size)), max_size=3)))
        ends = [0, *cuts, math.prod(size)]
        runs = [(first, last - first) for first, last in itertools.pairwise(ends)]
        pieces += (
            [box] if len(runs) == 1 else [Piece(name=name, shape=shape, start=box.start, size=box.size, run=run) for run in runs]
        )
    return pieces
