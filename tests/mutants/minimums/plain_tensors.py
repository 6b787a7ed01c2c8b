"""The smallest scenario for each mutant in tensor parallelism on plain tensors."""

from __future__ import annotations

from equivcheck.scenario import (
    SGD,
    ActivationSharding,
    AnyLayer,
    Axis,
    CrossEntropy,
    Data,
    Head,
    Layer,
    LayerPlan,
    Layout,
    LocalTensorParallel,
    LoRALinear,
    Mesh,
    Model,
    Norm,
    Scenario,
    Split,
    Tokens,
    Training,
)

LAYER, NORMED = Layer(width=2), Layer(width=2, norm=Norm.RMS)
ADAPTED = LoRALinear(rank=2)
WHOLE, COLUMN, ROW = LayerPlan(), LayerPlan(split=Split.COLWISE), LayerPlan(split=Split.ROWWISE)
LEAVES_ROWS = LayerPlan(output=ActivationSharding.ROWS)


def _on_2(training: Training, parallelism: LocalTensorParallel) -> Scenario:
    return Scenario(training=training, layout=Layout(mesh=Mesh(axes=(Axis(name="tp", size=2),)), parallelisms=(parallelism,)))


def _planned(*layers: AnyLayer, plan: tuple[LayerPlan, ...]) -> Scenario:
    training = Training(model=Model(features=2, layers=layers), data=Data(microbatches=(2,)))
    return _on_2(training, LocalTensorParallel(plan=plan))


def _of_tokens(**ends: object) -> Scenario:
    model = Model(features=2, length=2, source=Tokens(vocabulary=4), layers=(LAYER,), head=Head())
    training = Training(model=model, data=Data(microbatches=(2,)), optimizer=SGD(lr=0.1), loss=CrossEntropy())
    return _on_2(training, LocalTensorParallel(plan=(WHOLE,), **ends))  # type: ignore[arg-type]


MINIMUMS: dict[str, Scenario] = {
    "norm_gradient_of_own_rows": _planned(LAYER, NORMED, plan=(LEAVES_ROWS, COLUMN)),
    "replicated_weight_gradient_of_own_rows": _planned(LAYER, LAYER, plan=(LEAVES_ROWS, WHOLE)),
    "copy_to_region_missing": _planned(NORMED, plan=(COLUMN,)),
    "reduce_from_region_missing": _planned(LAYER, plan=(ROW,)),
    "reduce_from_region_averages": _planned(LAYER, plan=(ROW,)),
    "bias_within_reduce_from_region": _planned(LAYER, plan=(ROW,)),
    "adapter_scale_divided_by_ranks": _planned(ADAPTED, plan=(COLUMN,)),
    "adapter_gradient_not_reduced": _planned(ADAPTED, plan=(COLUMN,)),
    "tokens_of_others_looked_up": _of_tokens(source=Split.ROWWISE),
    "maximum_of_own_logits": _of_tokens(head=Split.COLWISE, loss_parallel=True),
}
"""Scenarios by mutant."""
