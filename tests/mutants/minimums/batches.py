"""The smallest scenario for each mutant of accumulation windows, means over sequences, packed documents and second heads."""

from __future__ import annotations

from equivcheck.scenario import (
    DDP,
    Axis,
    CrossEntropy,
    Data,
    Head,
    IgnoredLabels,
    Layer,
    Layout,
    Mesh,
    Model,
    Normaliser,
    Scenario,
    Tokens,
    Training,
)
from equivcheck.scenario.mesh import DP

LAYER = Layer(width=2)
HEAD = Head()
WINDOW = Data(microbatches=(2, 2), last_window=1)


def _accumulated(ranks: int = 1, *, no_sync: bool = False, **training: object) -> Scenario:
    """One layer and two steps, the last with one of two microbatches."""
    model = Model(features=2, layers=(LAYER,))
    return Scenario(
        training=Training(model=model, data=WINDOW, steps=2, **training),  # type: ignore[arg-type]
        layout=Layout(mesh=Mesh(axes=(Axis(name=DP, size=ranks),)), parallelisms=(DDP(no_sync=no_sync),)),
    )


def _labelled(ranks: int = 1, *, rows: int = 2, length: int = 2, head: Head = HEAD, **training: object) -> Scenario:
    """A token model with one layer and one step."""
    model = Model(features=2, length=length, source=Tokens(vocabulary=4), layers=(LAYER,), head=head)
    return Scenario(
        training=Training(model=model, data=Data(microbatches=(rows,)), **training),  # type: ignore[arg-type]
        layout=Layout(mesh=Mesh(axes=(Axis(name=DP, size=ranks),)), parallelisms=(DDP(),)),
    )


SEQUENCES = CrossEntropy(per=Normaliser.SEQUENCE, ignored=IgnoredLabels.SOME)
WEIGHTED = CrossEntropy(row_weights=True)

MINIMUMS: dict[str, Scenario] = {
    "trailing_window_divided_as_full": _accumulated(),
    "trailing_window_not_stepped": _accumulated(),
    "trailing_window_not_reduced": _accumulated(2, no_sync=True),
    "tokens_averaged_instead_of_sequences": _labelled(length=4, loss=SEQUENCES, seed=5),
    "sequences_averaged_over_ignored_labels": _labelled(length=4, loss=SEQUENCES),
    "row_weights_lost": _labelled(loss=WEIGHTED),
    "row_weights_not_counted": _labelled(loss=WEIGHTED),
    "row_weights_of_first_rank": _labelled(2, loss=WEIGHTED),
    "labels_of_first_window_counted": _accumulated(loss=CrossEntropy()),
}
"""Scenarios by mutant."""
