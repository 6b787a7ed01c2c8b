"""Expected calls for explicit gradient reductions after a step's last backward."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from equivcheck.layouts.base.expected_calls.clipping import keeps_gradient
from equivcheck.layouts.base.expected_calls.communication import Totals
from equivcheck.layouts.base.expected_calls.rank_view import Held, Ledger, RankView
from equivcheck.layouts.base.partition import local_shape


def sums_of_gradients(view: RankView, axis: str, kind: Iterable[Held], *, flat: bool = False) -> Totals:
    """Calls in all steps: one all-reduce over an axis for each gradient, or one for all gradients if `flat`.

    A rank sends nothing for an empty local gradient.
    """
    ledger, parameters = Ledger(), tuple(kind)
    for step in range(view.training.steps):
        sizes = list(_sizes(view, parameters, step))
        for size in [sum(sizes)] if flat and sizes else sizes:
            ledger.note(step, "all_reduce.sum", view.axes(axis), size * view.item_bytes)
    return ledger.totals


def _sizes(view: RankView, parameters: Iterable[Held], step: int) -> Iterator[int]:
    """Local elements of each gradient under all parallelisms in the layout."""
    coordinates = dict(zip(view.layout.mesh.names, view.coordinate, strict=True))
    for held in parameters:
        size = math.prod(local_shape(view.layout, held.parameter, coordinates))
        if size and keeps_gradient(view, held, step):
            yield size
