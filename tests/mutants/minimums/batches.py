"""The smallest scenario for each mutant of accumulation windows, means over sequences, packed documents and second heads."""

from __future__ import annotations

from equivcheck.scenario import (
    DDP,
    Attention,
    Axis,
    ContextParallel,
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
from equivcheck.scenario.mesh import CP, DP

LAYER = Layer(width=2)
ATTENTION = Attention(num_heads=1, num_kv_heads=1, head_dim=2)
HEAD = Head()
TWO = Head(predicts_two=True)
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


def _packed(*, attends: bool = False, learns: bool = False, head: Head = HEAD, **training: object) -> Scenario:
    """A token model with one layer and one step, on sequences of two documents."""
    model = Model(
        features=2,
        length=4,
        document_length=2,
        source=Tokens(vocabulary=4, learned_positions=learns),
        layers=(ATTENTION if attends else LAYER,),
        head=head,
    )
    return Scenario(
        training=Training(model=model, data=Data(microbatches=(2,)), loss=CrossEntropy(), **training),  # type: ignore[arg-type]
        layout=Layout(mesh=Mesh(axes=(Axis(name=DP, size=1),)), parallelisms=(DDP(),)),
    )


def _packed_in_shards() -> Scenario:
    """Documents of two positions on two context-parallel ranks with three positions each."""
    model = Model(features=2, length=6, document_length=2, source=Tokens(vocabulary=4), layers=(ATTENTION,), head=HEAD)
    return Scenario(
        training=Training(model=model, data=Data(microbatches=(2,)), loss=CrossEntropy()),
        layout=Layout(mesh=Mesh(axes=(Axis(name=CP, size=2),)), parallelisms=(ContextParallel(),)),
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
    "second_prediction_counted_as_first": _labelled(length=4, head=TWO, loss=CrossEntropy()),
    "second_prediction_of_next_token": _labelled(length=4, head=TWO, loss=CrossEntropy()),
    "second_prediction_crosses_documents": _packed(head=TWO),
    "documents_attend_to_each_other": _packed(attends=True),
    "learned_positions_run_on": _packed(learns=True),
    "labels_across_documents_counted": _packed(),
    "documents_averaged_instead_of_tokens": _packed(),
    "documents_counted_in_own_part": _packed_in_shards(),
    "boundaries_of_labels_counted_in_own_part": _packed_in_shards(),
}
"""Scenarios by mutant."""
