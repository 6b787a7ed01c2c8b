"""Fit training and layout to each other, so that ranks can split the rows and no limit applies."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import singledispatch
from typing import Any

from equivcheck.errors import EquivCheckError
from equivcheck.layouts.composition.limits import repair_layout, repair_training, repair_training_for_resume, why_unsupported
from equivcheck.scenario import Layout, Pipeline, Scenario, Training
from equivcheck.scenario.case import Checkable
from equivcheck.scenario.data import USUAL_ROWS


@singledispatch
def fit_scenario(case: Checkable, *, beyond: bool = False) -> Any:  # noqa: ARG001
    """Repair a scenario until no limit applies. Return None if repairs do not succeed.

    Tensor programs have no limits. With `beyond`, limits that torch enforces are ignored if the scenario has one layout.
    """
    return case


@fit_scenario.register
def _(scenario: Scenario, *, beyond: bool = False) -> Scenario | None:
    with suppress(EquivCheckError):
        layout = repair_layout(scenario.layout)
        first = () if scenario.resume is None else (scenario.resume.layout,)
        found = replace(scenario, training=fit_training(scenario.training, layout, *first, beyond=beyond), layout=layout)
        return found if why_unsupported(found, beyond=beyond) is None else None
    return None


def fit_training(training: Training, *layouts: Layout, beyond: bool = False) -> Training:
    """Repair a training until the layout can run it.

    With two layouts, repair it until a checkpoint can be saved under the first layout and loaded under the second.

    With `beyond`, limits that torch enforces are ignored. Raises `BrokenLayout` if limits still apply after many repairs.
    """
    return (
        repair_training_for_resume(training, *layouts) if len(layouts) > 1 else repair_training(training, *layouts, beyond=beyond)
    )


def row_multiple(layout: Layout, *, over_all_ranks: bool = False) -> int:
    """Return the number that must divide each microbatch's rows: data-parallel ranks times pipeline chunks.

    Presplit chunks do not count, because they need not be equal. With `over_all_ranks`, all ranks count instead of data-parallel
    ranks, because parallelisms such as sequence parallelism also split rows.
    """
    chunks = (pipeline.num_chunks for pipeline in layout.of(Pipeline) if not pipeline.presplit)
    return (layout.mesh.num_ranks if over_all_ranks else layout.num_data_ranks) * max(chunks, default=1)


def multiply_rows(training: Training, multiple: int) -> Training:
    """Multiply the rows of all microbatches by `multiple`, unless all numbers of rows are multiples of it already.

    Unequal microbatches stay unequal. Repairs of limits (`with_rows`) round to a multiple instead, which can make them equal.
    """
    rows = training.data.microbatches
    if all(count % multiple == 0 for count in rows):
        return training
    scaled = tuple(multiple * min(count, USUAL_ROWS // multiple) for count in rows)
    return replace(training, data=replace(training.data, microbatches=scaled))
