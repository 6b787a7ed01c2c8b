"""Scenarios with known issues in tensor parallelism."""

from __future__ import annotations

from dataclasses import replace

from equivcheck import Scenario
from equivcheck.scenario import (
    DDP,
    FSDP2,
    Axis,
    ClipNorm,
    CrossEntropy,
    Data,
    Head,
    IgnoredLabels,
    Layer,
    LayerPlan,
    Layout,
    Mesh,
    Model,
    Split,
    TensorParallel,
    Tokens,
    Training,
)
from unit.oracle.known.builders import (
    COLUMN,
    COLUMN_FIRST,
    FEATURES,
    FROZEN,
    INF,
    NORMED,
    ONE_WEIGHT,
    REPLICATED,
    ROWS,
    TIED,
    UNTIED,
    WHOLE,
    over_tp,
    scenario,
)


def of_labels(*, in_parts: bool = True, **loss: object) -> Scenario:
    """A vocabulary-parallel head, with a loss on sharded or gathered logits."""
    model = Model(features=2, source=Tokens(vocabulary=4), length=2, layers=(Layer(width=2),), head=Head())
    plan = TensorParallel(plan=(LayerPlan(),), head=Split.COLWISE, loss_parallel=in_parts)
    training = Training(model=model, data=Data(microbatches=(2,)), loss=CrossEntropy(**loss))  # type: ignore[arg-type]
    return Scenario(training=training, layout=Layout(mesh=Mesh(axes=(Axis(name="tp", size=2),)), parallelisms=(plan,)))


SHOWN = {
    "loss_parallel_smooths_labels": (
        of_labels(label_smoothing=0.1),
        [of_labels(), of_labels(label_smoothing=0.1, in_parts=False)],
    ),
    "loss_parallel_weights_of_ignored_labels": (
        of_labels(class_weights=True, ignored=IgnoredLabels.FIRST_ROWS),
        [
            of_labels(class_weights=True),
            of_labels(ignored=IgnoredLabels.FIRST_ROWS),
            of_labels(class_weights=True, ignored=IgnoredLabels.FIRST_ROWS, in_parts=False),
        ],
    ),
    "sequence_parallel_unfreezes": (
        scenario(ROWS, Layer(width=2), replace(NORMED, frozen=True), sizes=(1,)),
        [
            scenario(ROWS, Layer(width=2), NORMED, sizes=(1,)),
            scenario(WHOLE, Layer(width=2), replace(NORMED, frozen=True), sizes=(1,)),
        ],
    ),
    "clip_norm_epsilon_of_each_rank": (
        scenario(COLUMN, Layer(width=2), clipping=ClipNorm(max_norm=0.01)),
        [
            scenario(COLUMN, Layer(width=2), clipping=replace(INF, max_norm=0.01)),
            scenario(WHOLE, ONE_WEIGHT, ONE_WEIGHT, clipping=ClipNorm(max_norm=0.01)),
        ],
    ),
    "tensor_parallel_unfreezes": (
        scenario(COLUMN_FIRST, FROZEN, ONE_WEIGHT, sizes=(1,)),
        [scenario(COLUMN_FIRST, ONE_WEIGHT, ONE_WEIGHT, sizes=(1,)), scenario(WHOLE, FROZEN, ONE_WEIGHT, sizes=(1,))],
    ),
    "local_tensors_unfreeze": (
        over_tp(DDP(), FROZEN, ONE_WEIGHT),
        [
            over_tp(DDP(), ONE_WEIGHT, ONE_WEIGHT),
            over_tp(FSDP2(), FROZEN, ONE_WEIGHT),
            over_tp(REPLICATED, FROZEN, ONE_WEIGHT),
            scenario(DDP(), FROZEN, ONE_WEIGHT),
        ],
    ),
    "colwise_parallel_of_one": (
        scenario(COLUMN, Layer(width=1), sizes=(1,)),
        [
            scenario(COLUMN, Layer(width=1)),
            scenario(COLUMN, Layer(width=2), sizes=(1,)),
            scenario(COLUMN, ONE_WEIGHT, sizes=(1,)),
            scenario(TensorParallel(plan=(*COLUMN.plan, LayerPlan())), Layer(width=1, frozen=True), Layer(width=2), sizes=(1,)),
        ],
    ),
    "tensor_parallel_unties": (
        scenario(WHOLE, *TIED, features=2),
        [scenario(WHOLE, *UNTIED, features=2), scenario(DDP(), *TIED, features=2)],
    ),
    "uneven_local_activations": (
        scenario(FEATURES, Layer(width=3), Layer(width=2), features=2),
        [scenario(FEATURES, Layer(width=4), Layer(width=2), features=2), scenario(WHOLE, Layer(width=3), Layer(width=2))],
    ),
}
