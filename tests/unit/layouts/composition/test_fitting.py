"""Repairs of a scenario until its layout supports it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from equivcheck.layouts.composition.fitting import fit_scenario, fit_training, multiply_rows, row_multiple
from equivcheck.layouts.composition.limits import why_unsupported
from equivcheck.scenario import (
    ASGD,
    DDP,
    FSDP2,
    Axis,
    Compression,
    Data,
    Layer,
    LayerPlan,
    Layout,
    Mesh,
    Model,
    Parallelism,
    Pipeline,
    Precision,
    Resume,
    Scenario,
    TensorParallel,
    Training,
)

PLAIN = Training(model=Model(features=2, layers=(Layer(width=2),) * 2), data=Data(microbatches=(4,)), steps=2)


def layout(*parallelisms: Parallelism) -> Layout:
    """Layout with two ranks along each axis."""
    axes = tuple(Axis(name=parallelism.axes[0][0], size=2) for parallelism in reversed(parallelisms))
    return Layout(mesh=Mesh(axes=axes), parallelisms=parallelisms)


@pytest.mark.parametrize(("rows", "scaled"), [((4, 2), (4, 2)), ((2, 1), (4, 2)), ((3, 60), (6, 64))])
def test_rows_are_scaled_together(rows: tuple[int, ...], scaled: tuple[int, ...]) -> None:
    """Rows grow by one factor in all microbatches, up to the largest multiple that is generated; multiples stay."""
    assert multiply_rows(replace(PLAIN, data=Data(microbatches=rows)), 2).data.microbatches == scaled


def test_rows_are_a_multiple_of_data_ranks_times_chunks() -> None:
    """Tensor parallelism shards no rows unless asked to, and each data rank in a pipeline gets its chunks."""
    over_tp = layout(TensorParallel(plan=(LayerPlan(),) * 2), DDP())
    assert (row_multiple(over_tp), row_multiple(over_tp, over_all_ranks=True)) == (2, 4)
    assert row_multiple(layout(Pipeline(num_chunks=3))) == 3


def test_widths_are_fitted_to_two_layouts_that_cut_them_by_different_numbers() -> None:
    """Widths fit both layouts even near the largest width, although rounding for one alone does not suit the other."""

    def by_columns(num_ranks: int) -> Layout:
        return Layout(mesh=Mesh(axes=(Axis(name="dp", size=num_ranks),)), parallelisms=(FSDP2(shard_last_dim=True),))

    training = replace(PLAIN, model=Model(features=31, layers=(Layer(width=32),)), data=Data(microbatches=(12,)))
    for first, second in ((3, 4), (4, 3), (7, 4)):
        found = fit_training(training, by_columns(first), by_columns(second))
        assert {found.model.features, found.model.out_features} == {first * second}


def test_a_scenario_is_fitted_to_all_of_its_layouts() -> None:
    """Options, rows and features that a checkpoint does not support are repaired together; a supported scenario stays."""
    resume = Resume(layout=layout(DDP()), flatten_optimizer_state_dict=True)
    training = replace(PLAIN, optimizer=ASGD(), data=Data(microbatches=(3,)))
    found = fit_scenario(Scenario(training=training, layout=layout(DDP(compression=Compression.BF16)), resume=None))
    assert found is not None
    assert found.layout == layout(DDP(compression=Compression.FP16))
    assert found.training == replace(training, data=Data(microbatches=(4,)))

    resumed = fit_scenario(Scenario(training=training, layout=layout(DDP()), resume=resume))
    assert resumed is not None
    assert resumed.training == replace(found.training, precision=Precision.FLOAT32)
    assert why_unsupported(resumed) is None
    assert fit_scenario(resumed) == resumed


def test_a_layout_that_cannot_be_resumed_under_is_fitted_to_nothing() -> None:
    """The first layout is never changed, so a scenario whose first layout cannot save a checkpoint is given up."""
    first = layout(DDP(compression=Compression.FP16))
    assert fit_scenario(Scenario(training=PLAIN, layout=layout(DDP()), resume=Resume(layout=first))) is None
