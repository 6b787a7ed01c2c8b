"""Scenarios with two clipped steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from equivcheck import Scenario
from equivcheck.scenario import (
    AdamW,
    Axis,
    ClipNorm,
    CrossEntropy,
    Data,
    Execution,
    Layout,
    Loss,
    Mesh,
    Model,
    NormType,
    Parallelism,
    Training,
    ZeroGrad,
)

LABELS = CrossEntropy()


def clipped_scenario(  # noqa: PLR0913 - options, most by keyword
    model: Model,
    axes: Mapping[str, int],
    *parallelisms: Parallelism,
    microbatches: tuple[int, ...] = (4, 2),
    loss: Loss | CrossEntropy = LABELS,
    norm_type: NormType = NormType.TWO,
    zero_grad: ZeroGrad = ZeroGrad.NONE,
    **execution: Any,
) -> Scenario:
    """Two steps of two microbatches of unequal size, clipped by norm. `axes` has the mesh's sizes, outermost first."""
    training = Training(
        model=model,
        data=Data(microbatches=microbatches),
        loss=loss,
        optimizer=AdamW(),
        clipping=ClipNorm(max_norm=0.05, norm_type=norm_type),
        zero_grad=zero_grad,
        steps=2,
    )
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in axes.items()))
    return Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=parallelisms, execution=Execution(**execution)))
