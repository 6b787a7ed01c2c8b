"""What ranks communicate that reduce gradients by hand, after the last backward of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from equivcheck.layouts.base.expected_calls.clipping import keeps_gradient
from equivcheck.layouts.base.expected_calls.communication import Totals
from equivcheck.layouts.base.expected_calls.rank_view import Held, Ledger, RankView
from equivcheck.layouts.base.partition import local_shape


def sums_of_gradients(view: RankView, axis: str, kind: Iterable[Held], *, flat: bool = False) -> Totals:
    """The calls of all steps: for each gradient that a rank has anything of one sum over an axis, or one for all together."""
    ledger, parameters = Ledger(), tuple(kind)
    for step in range(view.training.steps):
        sizes = list(_sizes(view, parameters, step))
        for size in [sum(sizes)] if flat and sizes else sizes:
            ledger.note(step, "all_reduce.sum", view.axes(axis), size * view.item_bytes)
    return ledger.totals


def _sizes(view: RankView, parameters: Iterable[Held], step: int) -> Iterator[int]:
    """Elements of each gradient, as all parallelisms of the layout have cut it."""
    coordinates = dict(zip(view.layout.mesh.names, view.coordinate, strict=True))
    for held in parameters:
        size = math.prod(local_shape(view.layout, held.parameter, coordinates))
        if size and keeps_gradient(view, held, step):
            yield size
