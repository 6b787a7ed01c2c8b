"""Tests for the predicates that known.toml uses."""

from dataclasses import replace

import pytest

from equivcheck import Outcome, Scenario, check
from equivcheck.layouts.base.limits.repairs import with_loss, with_model
from equivcheck.layouts.base.plan.rules import UNFREEZES
from equivcheck.oracle.known_issues.predicates import NEEDS, SHOWS
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SPMD,
    Activation,
    ActivationSharding,
    AuxiliaryLinear,
    Axis,
    ClipValue,
    Data,
    Distribution,
    Experts,
    IgnoredLabels,
    Layer,
    LayerPlan,
    Layout,
    Loss,
    Mesh,
    Norm,
    Pipeline,
    Replicate,
    ShapeOp,
    ShardingStrategy,
    Split,
    TensorParallel,
    Wrapping,
    ZeroGrad,
)
from equivcheck.system.torch_version import is_torch_in
from equivcheck.worlds.trace.differences import Difference, Divergence, Phase
from support.supported import require_supported
from unit.oracle.known.builders import (
    DIVIDED,
    FROZEN,
    FULLY_SHARD,
    HYBRID,
    INF,
    REPLICATED,
    ROWS,
    TIED,
    TIED_UNITS,
    ZB,
    around_stages,
    over_tp,
    scaled,
    scenario,
)
from unit.oracle.known.examples import SHOWN

pytestmark = pytest.mark.filterwarnings("ignore:.*NO_SHARD", "ignore:Called FSDP.clip_grad_norm_")

SMALL = replace(FSDP1(), wrapping=Wrapping.PER_LAYER)
SECOND_BY_COLUMNS = TensorParallel(plan=(LayerPlan(), LayerPlan(split=Split.COLWISE)))
TRAINED_LAST = (Layer(width=2, frozen=True), Layer(width=2, bias=False))


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        (scenario(FSDP1()), True),
        (scenario(FSDP1(), sizes=(1,)), False),
        (scenario(FSDP1(use_orig_params=False)), False),
        (scenario(FSDP1(strategy=ShardingStrategy.NO_SHARD)), False),
        (scenario(FSDP1(), Layer(width=2, bias=False)), False),
        (scenario(FSDP1(), Layer(width=2, bias=False), sizes=(3,)), True),
        (scenario(FSDP1(), Layer(width=1)), False),
        (scenario(FSDP1(), Layer(width=1), sizes=(3,)), True),
        (scenario(FSDP1(), Layer(width=3, bias=False, norm=Norm.RMS), sizes=(4,)), True),
        (scenario(FSDP1(), *TRAINED_LAST, features=2), True),
        (scenario(SMALL, *TRAINED_LAST, features=2), False),
        (scenario(HYBRID, sizes=(2, 2)), True),
        (scenario(HYBRID, sizes=(2, 1)), False),
        (scenario(FSDP2()), False),
    ],
)
def test_a_rank_without_gradients_is_one_that_does_not_reach_the_clipping(example: Scenario, expected: bool) -> None:
    """The predicate holds exactly for layouts on which `clip_grad_value_` gets no gradient on some rank."""
    assert NEEDS["rank_without_gradients"](example) is expected
    clipped = replace(example, training=replace(example.training, clipping=ClipValue()))
    assert (check(clipped).known == "clip_grad_value_of_nothing") is expected


@pytest.mark.parametrize("scales", [False, True])
def test_a_scale_has_a_gradient_in_the_last_stage(scales: bool) -> None:
    """A pipeline's last rank with frozen layers has a gradient only if the model has an output scale."""
    plain = scenario(Pipeline(), Layer(width=1), Layer(width=1, frozen=True), clipping=ClipValue())
    example = scaled(plain) if scales else plain
    assert NEEDS["rank_without_gradients"](example) is not scales
    require_supported(example)
    assert (check(example).known == "clip_grad_value_of_nothing") is not scales


@pytest.mark.torch(">=2.11", "GPipe of earlier versions needs as many chunks as stages")
@pytest.mark.parametrize(
    ("steps", "zero_grad", "expected"), [(1, ZeroGrad.NONE, False), (2, ZeroGrad.NONE, True), (2, ZeroGrad.ZERO, False)]
)
def test_a_rank_may_lack_gradients_in_some_steps_only(steps: int, zero_grad: ZeroGrad, expected: bool) -> None:
    """The last rank trains only an auxiliary linear, which does not run at step 1. Zeroed gradients of step 0 remain."""
    trained_at_even_steps = Layer(width=1, bias=False, shares=1, auxiliary=AuxiliaryLinear.EVEN_STEPS)
    stages, layers = Pipeline(boundaries=(1,)), (Layer(width=1), FROZEN, trained_at_even_steps)
    example = scenario(stages, *layers, clipping=ClipValue(), steps=steps, zero_grad=zero_grad)
    assert NEEDS["rank_without_gradients"](example) is expected
    assert (check(example).known == "clip_grad_value_of_nothing") is expected


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        (scenario(FSDP2(), Layer(width=4), sizes=(3,)), True),
        (scenario(FSDP2(), Layer(width=5), sizes=(3,)), False),
        (scenario(FSDP2(), Layer(width=1), sizes=(2, 1)), False),
        (scenario(FSDP2(), Layer(width=1), sizes=(1, 2)), True),
        (scenario(FSDP2(), Layer(width=2), Layer(width=1, frozen=True)), False),
        (scenario(FSDP2(), Layer(width=2, norm=Norm.RMS)), True),
        (over_tp(FSDP2(), Layer(width=8), tp=2, split=Split.COLWISE), False),
        (over_tp(FSDP2(), Layer(width=8, norm=Norm.RMS), tp=2, split=Split.COLWISE, features=2), False),
        (scenario(SPMD()), False),
        (scenario(FULLY_SHARD), True),
        (scenario(TensorParallel(plan=(LayerPlan(split=Split.ROWWISE),)), Layer(width=1), features=2), False),
        (scenario(TensorParallel(), Layer(width=1)), False),
        (scenario(SECOND_BY_COLUMNS, Layer(width=1), Layer(width=1, frozen=True)), is_torch_in(UNFREEZES)),
        (scenario(SECOND_BY_COLUMNS, Layer(width=1, frozen=True), Layer(width=2)), False),
        (scenario(DDP()), False),
    ],
)
def test_an_empty_shard_is_what_the_infinity_norm_stumbles_over(example: Scenario, expected: bool) -> None:
    """The predicate holds exactly for layouts with an empty gradient shard on some rank."""
    assert NEEDS["gradient_has_an_empty_shard"](example) is expected
    clipped = replace(example, training=replace(example.training, clipping=INF))
    require_supported(clipped)
    assert (check(clipped).known == "inf_norm_of_empty_shard") is expected


@pytest.mark.parametrize("name", NEEDS)
def test_each_need_holds_for_some_scenario_and_not_for_another(name: str) -> None:
    """No predicate always holds or never holds."""
    examples = [example for shown, healthy in SHOWN.values() for example in (shown, *healthy)]
    assert {NEEDS[name](example) for example in examples} == {True, False}


@pytest.mark.parametrize("parallelism", [DDP(), Replicate()], ids=lambda each: each.tag)
def test_what_tensor_parallelism_makes_trainable_may_take_no_part(parallelism: DDP | Replicate) -> None:
    """DDP waits for unfrozen parameters in a layer that no step uses, and leaves gradients unreduced."""
    frozen = Layer(width=1, frozen=True, auxiliary=AuxiliaryLinear.NEVER)
    example = over_tp(parallelism, Layer(width=2), frozen)
    assert NEEDS["unused_parameters_not_looked_for"](example)
    assert not NEEDS["unused_parameters_not_looked_for"](over_tp(parallelism, Layer(width=2), replace(frozen, auxiliary=None)))
    assert check(example, beyond=True).known == "ddp_unused_parameters"


SECOND_AT_SOME_STEPS = (
    Layer(width=3, residual=True, shape_op=ShapeOp.ONES),
    Layer(width=3, activation=Activation.SILU, auxiliary=AuxiliaryLinear.EVEN_STEPS),
)


@pytest.mark.parametrize(
    ("zero_grad", "steps", "expected"),
    [(ZeroGrad.ZERO, 2, Outcome.KNOWN), (ZeroGrad.ZERO, 1, Outcome.EQUIVALENT), (ZeroGrad.NONE, 2, Outcome.EQUIVALENT)],
)
@pytest.mark.torch(">=2.12,<2.14", "other versions add them")
def test_gradients_of_unlike_steps_are_added_where_they_are_kept(zero_grad: ZeroGrad, steps: int, expected: Outcome) -> None:
    """If a second linear runs in some steps only, gradients have other placements there.

    Gradients kept as zeros are added to those.
    """
    spmd = SPMD(distribution=Distribution.FULLY_SHARD, redistribute_gradients=False)
    example = scenario(spmd, *SECOND_AT_SOME_STEPS, features=3, sizes=(3,), loss=Loss.LINEAR_SUM)
    training = replace(example.training, zero_grad=zero_grad, steps=steps)
    assert check(replace(example, training=training)).outcome is expected


@pytest.mark.parametrize(
    ("difference", "actual", "expected"),
    [
        (Difference.RANKS_DISAGREE, "0.3", True),
        (Difference.VALUE, "0.5", True),
        (Difference.VALUE, "0.3", False),
        (Difference.VALUE, "1.0", False),
    ],
)
def test_replicas_that_are_not_reduced_may_have_the_same_gradient(difference: Difference, actual: str, expected: bool) -> None:
    """Replicas then agree on a part of the sum, so another issue explains any other difference."""
    found = Divergence(
        step=0, phase=Phase.GRADIENT, tensor="bias", difference=difference, rank=0, expected="1.0", actual=actual, error=1e9
    )
    assert SHOWS["left_unreduced"](scenario(HYBRID, sizes=(2, 1)), found) is expected


MOVED = replace(DIVIDED, experts_on_all_ranks=True)


@pytest.mark.parametrize(
    ("fsdp", "tensor", "actual", "expected"),
    [
        (DIVIDED, "layers.0.experts.gate", "0.25", True),
        (MOVED, "layers.0.router.weight", "0.25", True),
        (MOVED, "layers.0.router.weight", "0.0", False),
        (MOVED, "layers.0.experts.gate", "0.25", False),
    ],
)
def test_experts_with_several_shards_are_divided_once(fsdp: FSDP2, tensor: str, actual: str, expected: bool) -> None:
    """`fully_shard` divides twice only on a mesh with one shard. Experts on all ranks have a shard on each."""
    example = scenario(fsdp, Experts(hidden=1), sizes=(2, 1), features=2)
    found = Divergence(
        step=0, phase=Phase.GRADIENT, tensor=tensor, difference=Difference.VALUE, rank=0, expected="1.0", actual=actual, error=1e9
    )
    assert NEEDS["divided_apart_on_one_shard"](example)
    assert SHOWS["divided_once_more"](example, found) is expected


@pytest.mark.parametrize(
    ("stages", "chunks", "ranks", "raises"),
    [(2, 4, 2, False), (3, 3, 2, False), (3, 4, 2, True), (3, 6, 2, True), (4, 4, 2, False), (3, 4, 1, False)],
)
@pytest.mark.torch(">=2.10", "stages of torch 2.9 cannot exchange messages over gloo")
def test_an_odd_number_of_resharded_stages_raises_and_others_lose_gradients(
    stages: int, chunks: int, ranks: int, raises: bool
) -> None:
    """Only with an odd number of stages, a forward reshards a stage whose input-gradient pass found full parameters."""
    pipeline = Pipeline(schedule=ZB, stages_per_rank=stages, num_chunks=chunks)
    rows = Data(microbatches=(2 * chunks,))
    example = around_stages(pipeline, FSDP2(), sizes=(1, ranks), num_layers=stages * ranks, data=rows)
    assert NEEDS["forward_between_backward_passes"](example) is raises
    crash, lost = "split_backward_around_reshard", "split_backward_of_resharded_stage"
    assert check(example, beyond=True).known == (crash if raises else lost)


@pytest.mark.parametrize(("chunks", "expected"), [(1, False), (2, True)])
def test_rows_of_each_chunk_are_cut(chunks: int, expected: bool) -> None:
    """Two tensor-parallel ranks share two rows evenly, but not the single row of each chunk."""
    mesh = Mesh(axes=(Axis(name="pp", size=1), Axis(name="tp", size=2)))
    layout = Layout(mesh=mesh, parallelisms=(ROWS, Pipeline(num_chunks=chunks)))
    example = replace(scenario(Pipeline(), *TIED, data=Data(microbatches=(2,)), features=2), layout=layout)
    assert NEEDS["activations_cut_unevenly"](example) is expected


@pytest.mark.parametrize("units", [TIED_UNITS, replace(REPLICATED, wrapping=Wrapping.PER_LAYER)], ids=lambda units: units.tag)
def test_units_share_a_weight_under_replicate_too(units: FSDP2 | Replicate) -> None:
    """`replicate_with_fsdp` makes units by `fully_shard`."""
    weight_in_two_units = NEEDS["weight_in_two_units"]
    assert weight_in_two_units(scenario(units, *TIED, features=2))
    assert not weight_in_two_units(scenario(replace(units, wrapping=Wrapping.ROOT_ONLY), *TIED, features=2))
    assert not weight_in_two_units(scenario(units, TIED[0], features=2))


def test_labels_at_the_ends_of_documents_are_ignored() -> None:
    """Class weights of `loss_parallel` meet an ignored label in a packed row, too, until rows have one document."""
    example, _ = SHOWN["loss_parallel_weights_of_ignored_labels"]
    training = with_loss(example.training, ignored=IgnoredLabels.NONE)
    packed = replace(example, training=with_model(training, document_length=1))
    require_supported(packed)
    verdict = check(packed)
    assert verdict.known == "loss_parallel_weights_of_ignored_labels"
    assert not NEEDS["weighs_ignored_labels_in_parts"](replace(example, training=training))


def test_gradients_of_exchanged_rows_are_not_contiguous() -> None:
    """A row-parallel linear at the start of a stage exchanges rows for unequal shards of features, and its gradient back."""
    split = LayerPlan(split=Split.ROWWISE, output=ActivationSharding.ROWS)
    example, _ = SHOWN["stage_output_not_contiguous"]
    plan = TensorParallel(plan=(split, LayerPlan(split=Split.ROWWISE)))
    (pipeline,) = example.layout.of(Pipeline)
    layout = replace(example.layout, parallelisms=(plan, replace(pipeline, sends_dtensors=True)))
    assert NEEDS["stages_send_padded_features"](replace(example, layout=layout))
    even = with_model(example.training, layers=(Layer(width=4), Layer(width=2)))
    assert not NEEDS["stages_send_padded_features"](replace(example, training=even, layout=layout))
