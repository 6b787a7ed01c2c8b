"""The smallest scenario that shows each mutant of token models."""

from __future__ import annotations

from equivcheck.scenario import (
    DDP,
    ActivationSharding,
    AnyLayer,
    Axis,
    CrossEntropy,
    Data,
    Head,
    Ignored,
    Layer,
    LayerPlan,
    Layout,
    Mesh,
    Model,
    Parallelism,
    Scenario,
    Split,
    TensorParallel,
    Tokens,
    Training,
)

PLAIN = DDP()
LAYER = Layer(width=2)
TOKENS = Tokens(vocabulary=4)
HEAD = Head()
ALL_LABELS = CrossEntropy()
LABELS = CrossEntropy(ignored=Ignored.FIRST_ROWS)
BY_POSITIONS = TensorParallel(plan=(LayerPlan(split=Split.REPLICATED, output=ActivationSharding.ROWS),), head=Split.REPLICATED)


def _scenario(  # noqa: PLR0913 - what a minimum may have
    *layers: AnyLayer,
    ranks: int = 1,
    by: Parallelism = PLAIN,
    microbatches: tuple[int, ...] = (2,),
    source: Tokens = TOKENS,
    head: Head = HEAD,
    length: int = 2,
    loss: CrossEntropy = ALL_LABELS,
    steps: int = 1,
    seed: int = 0,
) -> Scenario:
    model = Model(features=2, length=length, source=source, layers=layers or (LAYER,), head=head)
    axis = "tp" if isinstance(by, TensorParallel) else "dp"
    return Scenario(
        training=Training(model=model, data=Data(microbatches=microbatches), loss=loss, steps=steps, seed=seed),
        layout=Layout(mesh=Mesh(axes=(Axis(name=axis, size=ranks),)), parallelisms=(by,)),
    )


MINIMUMS: dict[str, Scenario] = {
    "labels_counted_by_each_rank": _scenario(ranks=2, microbatches=(4,), loss=CrossEntropy(ignored=Ignored.SOME), seed=5),
    "labels_counted_by_microbatch": _scenario(microbatches=(1, 1), loss=CrossEntropy(ignored=Ignored.FIRST_MICROBATCH)),
    "labels_counted_by_microbatch_of_each_rank": _scenario(ranks=2, microbatches=(4, 4), loss=CrossEntropy(ignored=Ignored.SOME)),
    "ignored_labels_counted": _scenario(loss=LABELS),
    "labels_counted_without_class_weights": _scenario(loss=CrossEntropy(class_weights=True)),
    "labels_not_counted": _scenario(),
    "labels_of_all_ranks_counted_and_averaged": _scenario(ranks=2),
    "ignored_label_replaced": _scenario(loss=LABELS),
    "labels_shifted_within_parts": _scenario(ranks=2, by=BY_POSITIONS, length=4),
    "label_lost_at_borders": _scenario(ranks=2, by=BY_POSITIONS),
    "z_loss_summed_over_ranks": _scenario(ranks=2, loss=CrossEntropy(z_loss=0.5)),
    "z_loss_lost": _scenario(loss=CrossEntropy(z_loss=0.5)),
    "label_smoothing_lost": _scenario(loss=CrossEntropy(label_smoothing=0.5)),
    "class_weights_lost": _scenario(loss=CrossEntropy(class_weights=True)),
}
"""By the name of the mutant."""
