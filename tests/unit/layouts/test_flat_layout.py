"""Predicted FSDP1 shards hold the same elements as the ranks' shards."""

from __future__ import annotations

import pytest

from equivcheck.layouts.composition.program import rank_program
from equivcheck.layouts.parallelisms.fsdp1.flat_layout import alignment_of, flat_starts, held_of
from equivcheck.layouts.parallelisms.fsdp1.known import rank_without_gradients
from equivcheck.scenario import (
    FSDP1,
    Axis,
    Data,
    ElementType,
    Layer,
    Layout,
    Mesh,
    MixedPrecision,
    Model,
    Norm,
    Precision,
    Scenario,
    Training,
    Wrapping,
)
from equivcheck.training.layers.parameters import group_by_layer, parameters_of
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.trace.trace import Trace

NUM_RANKS = 3
LAYERS = (Layer(width=5, norm=Norm.LAYER, frozen=True), Layer(width=1, bias=False), Layer(width=3))
HALF = MixedPrecision(param=ElementType.BFLOAT16)


def scenario(fsdp: FSDP1, precision: Precision, layers: tuple[Layer, ...] = LAYERS, num_ranks: int = NUM_RANKS) -> Scenario:
    """One step with a small model on ranks that shard it."""
    training = Training(model=Model(features=3, layers=layers), data=Data(microbatches=(num_ranks,)), precision=precision)
    return Scenario(training=training, layout=Layout(mesh=Mesh(axes=(Axis(name="dp", size=num_ranks),)), parallelisms=(fsdp,)))


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("wrapping", Wrapping)
@pytest.mark.parametrize("policy", [None, HALF], ids=["one precision", "mixed precision"])
def test_shards_hold_what_the_arithmetic_says(policy: MixedPrecision | None, wrapping: Wrapping, precision: Precision) -> None:
    """Parameters are aligned in the unit's compute dtype, which may differ from their own."""
    fsdp = FSDP1(use_orig_params=True, wrapping=wrapping, mixed_precision=policy)
    drawn = scenario(fsdp, precision)
    parameters = parameters_of(drawn.training.model)
    units = [list(parameters)] if wrapping is Wrapping.ROOT_ONLY else group_by_layer(parameters)
    traces: tuple[Trace, ...] = ranks("sim", NUM_RANKS).run(rank_program, drawn).values
    for rank, trace in enumerate(traces):
        expected = {
            parameter.full_name: numel
            for unit in units
            for parameter, numel in zip(
                unit,
                held_of([parameter.numel for parameter in unit], alignment_of(drawn.training, fsdp), NUM_RANKS, rank),
                strict=True,
            )
        }
        assert {piece.name: piece.numel for piece in trace.steps[0].parameters.pieces} == expected


def test_a_rank_that_computes_in_lower_precision_may_hold_nothing() -> None:
    """Five trained elements after three frozen ones start at 4 of 9 in float32, but at 8 of 13 in bfloat16: on rank 1 only."""
    layers = (Layer(width=1, bias=False, frozen=True), Layer(width=5, bias=False))
    for policy in (None, HALF):
        drawn = scenario(FSDP1(use_orig_params=True, mixed_precision=policy), Precision.FLOAT32, layers, num_ranks=2)
        traces: tuple[Trace, ...] = ranks("sim", 2).run(rank_program, drawn).values
        lacking = [
            not sum(piece.numel for piece in trace.steps[0].parameters.pieces if piece.name.startswith("layers.1"))
            for trace in traces
        ]
        assert rank_without_gradients(drawn) == any(lacking) == (policy is HALF)


def test_starts_are_aligned() -> None:
    """Each parameter starts at a multiple of the alignment, and the last entry is the flat parameter's end."""
    assert flat_starts((3, 1, 4), 4) == (0, 4, 8, 12)
    assert flat_starts((3, 1, 4), 1) == (0, 3, 4, 8)
    assert held_of((3, 1, 4), 4, 3, 1) == (0, 1, 0)
