"""The smallest scenario for each mutant of accumulation windows, means over sequences, packed documents and second heads."""

from __future__ import annotations

from equivcheck.scenario import (
    DDP,
    Axis,
    CrossEntropy,
    Data,
    Layer,
    Layout,
    Mesh,
    Model,
    Scenario,
    Training,
)
from equivcheck.scenario.mesh import DP

LAYER = Layer(width=2)
WINDOW = Data(microbatches=(2, 2), last_window=1)


def _accumulated(ranks: int = 1, *, no_sync: bool = False, **training: object) -> Scenario:
    """One layer and two steps, the last with one of two microbatches."""
    model = Model(features=2, layers=(LAYER,))
    return Scenario(
        training=Training(model=model, data=WINDOW, steps=2, **training),  # type: ignore[arg-type]
        layout=Layout(mesh=Mesh(axes=(Axis(name=DP, size=ranks),)), parallelisms=(DDP(no_sync=no_sync),)),
    )


MINIMUMS: dict[str, Scenario] = {
    "trailing_window_divided_as_full": _accumulated(),
    "trailing_window_not_stepped": _accumulated(),
    "trailing_window_not_reduced": _accumulated(2, no_sync=True),
    "labels_of_first_window_counted": _accumulated(loss=CrossEntropy()),
}
"""Scenarios by mutant."""
