"""How the parts of a scenario are fitted to each other: rows that ranks can share out, and nothing that a layout cannot run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import singledispatch
from typing import Any

from equivcheck.errors import EquivCheckError
from equivcheck.layouts.composition.limits import repaired, repaired_layout, resumable_training, why_unsupported
from equivcheck.scenario import Layout, Pipeline, Scenario, Training
from equivcheck.scenario.case import Case
from equivcheck.scenario.data import USUAL_ROWS


@singledispatch
def fitted(case: Case, *, beyond: bool = False) -> Any:  # noqa: ARG001
    """The nearest scenario within all limits; None where repairs lead to none. Other cases have no limits.

    With `beyond`, limits that torch draws on a layout do not count where a scenario has one layout.
    """
    return case


@fitted.register
def _(scenario: Scenario, *, beyond: bool = False) -> Scenario | None:
    with suppress(EquivCheckError):
        layout = repaired_layout(scenario.layout)
        first = () if scenario.resume is None else (scenario.resume.layout,)
        found = replace(scenario, training=fitted_training(scenario.training, layout, *first, beyond=beyond), layout=layout)
        return found if why_unsupported(found, beyond=beyond) is None else None
    return None


def fitted_training(training: Training, *layouts: Layout, beyond: bool = False) -> Training:
    """The nearest training that a layout can run, or that two can one after the other. Raises `BrokenLayout`.

    With `beyond`, limits that torch draws on a layout do not count.
    """
    return resumable_training(training, *layouts) if len(layouts) > 1 else repaired(training, *layouts, beyond=beyond)


def row_multiple(layout: Layout, *, over_all_ranks: bool = False) -> int:
    """What rows of a microbatch are a multiple of: chunks of a pipeline on each data-parallel rank.

    With `over_all_ranks`, also where parallelisms other than data parallelism cut rows, as sequence parallelism does.
    """
    chunks = (pipeline.num_chunks for pipeline in layout.of(Pipeline))
    return (layout.mesh.num_ranks if over_all_ranks else layout.num_data_ranks) * max(chunks, default=1)


def with_scaled_rows(training: Training, multiple: int) -> Training:
    """The training with all microbatches that many times as large, if some are no multiple; unequal ones stay unequal.

    Limits round rows to the nearest multiple instead, which makes unequal microbatches equal.
    """
    rows = training.data.microbatches
    if all(count % multiple == 0 for count in rows):
        return training
    scaled = tuple(multiple * min(count, USUAL_ROWS // multiple) for count in rows)
    return replace(training, data=replace(training.data, microbatches=scaled))
