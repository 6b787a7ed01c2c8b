"""What `fully_shard` has beside its defaults, on ranks: equal to one device, and not where one thing is left out."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

from equivcheck import Outcome, Scenario, check
from equivcheck.export.script import script_of
from equivcheck.layouts.composition.limits import repair_training
from equivcheck.layouts.parallelisms.fsdp2.division import FACTOR_OF_ALL_RANKS
from equivcheck.scenario import (
    FSDP2,
    Axis,
    Data,
    ElementType,
    GatedMLP,
    Layer,
    LayerPlan,
    Layout,
    LocalTensorParallel,
    Loss,
    Mesh,
    MixedPrecision,
    Model,
    Norm,
    Precision,
    Split,
    Training,
    Wrapping,
)
from equivcheck.system.torch_version import is_torch_in
from equivcheck.training.setup import Setup
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.stage import Stage
from support.verdicts import first_divergence, require_predicted

TRAINING = Training(
    model=Model(features=3, layers=(Layer(width=3), Layer(width=2))),
    data=Data(microbatches=(8, 8)),
    precision=Precision.FLOAT32,
    steps=2,
)
LOW = MixedPrecision(param=ElementType.BFLOAT16, reduce=ElementType.FLOAT32)
HALF = MixedPrecision(param=ElementType.FLOAT16, reduce=ElementType.FLOAT16)
PER_LAYER = FSDP2(wrapping=Wrapping.PER_LAYER)


def scenario(fsdp: FSDP2, *sizes: int, loss: Loss = Loss.MSE_SUM) -> Scenario:
    """A training of two microbatches on four ranks, or on axes of other sizes."""
    axes = FSDP2.axes[len(sizes) - 1] if sizes else FSDP2.axes[0]
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in zip(axes, sizes or (4,), strict=True)))
    return Scenario(training=replace(TRAINING, loss=loss), layout=Layout(mesh=mesh, parallelisms=(fsdp,)))


@pytest.mark.parametrize("loss", [Loss.MSE_SUM, Loss.MSE_MEAN])
@pytest.mark.parametrize(
    ("fsdp", "sizes"),
    [
        (FSDP2(sum_reductions=True), (2, 2)),
        (FSDP2(sum_reductions=True, gradient_divide_factor=3.0, wrapping=Wrapping.PER_LAYER), (4,)),
        (FSDP2(sum_reductions=True, gradient_divide_factor=0.5, no_sync=True), (2, 2)),
        (FSDP2(gradient_divide_factor=4.0), (4,)),
        (FSDP2(gradient_divide_factor=2.5, mixed_precision=HALF), (2, 2)),
        (FSDP2(sum_reductions=True, gradient_divide_factor=2.5, mixed_precision=LOW), (2, 2)),
    ],
)
def test_gradients_divided_by_another_number_come_out_alike(fsdp: FSDP2, sizes: tuple[int, ...], loss: Loss) -> None:
    """Whether losses are means or sums, and at the rounding of lower precision."""
    assert check(scenario(fsdp, *sizes, loss=loss)).outcome is Outcome.EQUIVALENT


@pytest.mark.skipif(is_torch_in(FACTOR_OF_ALL_RANKS), reason="this torch has averages over all ranks only")
def test_where_the_factor_is_the_number_of_shards_the_backend_divides() -> None:
    """Gradients are averaged over shards and summed over replicas."""
    verdict = check(scenario(FSDP2(gradient_divide_factor=2.0), 2, 2))

    assert verdict.outcome is Outcome.EQUIVALENT
    assert {call.op for call in verdict.calls[0]} >= {"reduce_scatter.avg", "all_reduce.sum"}


def test_a_factor_that_the_loss_does_not_know_of_is_found() -> None:
    """Sums divided by three and not by four are four thirds of the gradients."""

    def forget(setup: Setup) -> None:
        setup.gradient_scale = 1.0

    fsdp = FSDP2(sum_reductions=True, gradient_divide_factor=3.0)
    first = first_divergence(check(scenario(fsdp), alter=forget))
    assert float(first.actual) / float(first.expected) == pytest.approx(4 / 3, rel=1e-4)


@pytest.mark.parametrize("policy", [None, LOW, HALF, MixedPrecision(reduce=ElementType.BFLOAT16)])
@pytest.mark.parametrize("sizes", [(2, 2), (4,), (1, 2)])
def test_replicas_are_added_up_once_a_step(sizes: tuple[int, ...], policy: MixedPrecision | None) -> None:
    """Gradients are those of one device that rounds as often, whether there are replicas or not."""
    assert check(scenario(FSDP2(all_reduce_once=True, mixed_precision=policy), *sizes)).outcome is Outcome.EQUIVALENT


@pytest.mark.parametrize(("once", "calls"), [(False, 4), (True, 2)])
def test_shards_are_reduced_at_each_microbatch_and_replicas_at_the_last(*, once: bool, calls: int) -> None:
    """Of two steps with two microbatches each."""
    verdict = require_predicted(scenario(FSDP2(all_reduce_once=once), 2, 2))
    ops = [call.op for call in verdict.calls[0] if call.stage is Stage.COMPUTE]
    assert (ops.count("reduce_scatter.avg"), ops.count("all_reduce.avg")) == (4, calls)


def test_replicas_that_are_not_added_up_are_found() -> None:
    """A model that is never told of the last microbatch keeps gradients that have not been reduced."""

    def never(setup: Setup) -> None:
        setup.accumulation = lambda _last: nullcontext(setup.model.set_requires_all_reduce(False))  # type: ignore[operator]

    assert check(scenario(FSDP2(), 2, 2), alter=never).outcome is Outcome.DIVERGED


@pytest.mark.parametrize("sizes", [(4,), (2, 4)])
@pytest.mark.parametrize("fsdp", [FSDP2(), FSDP2(wrapping=Wrapping.PER_LAYER), FSDP2(mixed_precision=LOW, cpu_offload=True)])
def test_parameters_resharded_to_two_ranks_are_gathered_over_them(fsdp: FSDP2, sizes: tuple[int, ...]) -> None:
    """Backward gathers over each rank's neighbour what forward gathers over all shards, dims that are cut unevenly included."""
    plain, resharded = check(scenario(fsdp, *sizes)), check(scenario(replace(fsdp, reshard_to=2), *sizes))

    assert (resharded.outcome, resharded.unmodelled) == (Outcome.EQUIVALENT, "")
    for rank, (before, after) in enumerate(zip(plain.calls, resharded.calls, strict=True)):
        groups = [{len(call.ranks) for call in calls if call.op == "all_gather"} for calls in (before, after)]
        assert groups == [{4}, {2, 4}], rank


def test_gathering_over_all_shards_what_two_ranks_share_is_found() -> None:
    """It gives the same numbers, but is not what the layout says."""

    def over_all(setup: Setup) -> None:
        setup.model.set_reshard_after_forward(True)  # type: ignore[operator]

    assert first_divergence(check(scenario(FSDP2(reshard_to=2)), alter=over_all)).phase is Phase.COMMUNICATION


LAST_DIMS = replace(TRAINING, model=Model(features=4, layers=(Layer(width=4, norm=Norm.LAYER), Layer(width=3))))


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
@pytest.mark.parametrize("fsdp", [FSDP2(), FSDP2(wrapping=Wrapping.PER_LAYER, mixed_precision=LOW)])
def test_parameters_cut_along_their_last_dim_train_alike(fsdp: FSDP2, sizes: tuple[int, ...]) -> None:
    """Ranks gather and reduce parts without padding: rows need not be a multiple of the ranks."""
    ours = replace(scenario(replace(fsdp, shard_last_dim=True), *sizes), training=LAST_DIMS)
    require_predicted(ours)


def test_a_last_dim_that_is_cut_unevenly_is_unsupported() -> None:
    """Torch raises, and the nearest training has widths that are multiples of the ranks."""
    uneven = scenario(FSDP2(shard_last_dim=True))

    for beyond, outcome in ((False, Outcome.UNSUPPORTED), (True, Outcome.CRASHED)):
        verdict = check(uneven, beyond=beyond)
        assert (verdict.outcome, "uneven sharding on dim 1" in verdict.reason) == (outcome, True)
    assert check(replace(uneven, training=repair_training(TRAINING, uneven.layout))).outcome is Outcome.EQUIVALENT


def test_parts_that_some_ranks_alone_can_cut_are_on_file() -> None:
    """Of three features one rank of tensor parallelism has two and one has one: that raises, and others wait for it."""
    axes = (Axis(name="dp", size=2), Axis(name="tp", size=2))
    plan = LocalTensorParallel(plan=(LayerPlan(split=Split.HEADS_OR_HIDDEN),))
    layout = Layout(mesh=Mesh(axes=axes), parallelisms=(plan, FSDP2(shard_last_dim=True)))
    training = Training(model=Model(features=2, layers=(GatedMLP(hidden=3),)), data=Data(microbatches=(2,)))
    assert check(Scenario(training=training, layout=layout), beyond=True).known == "fsdp2_refuses_columns_of_some_ranks"


def with_frozen_layer(fsdp: FSDP2) -> Scenario:
    """Two layers, the first of them frozen."""
    first, second = TRAINING.model.layers
    model = replace(TRAINING.model, layers=(replace(first, frozen=True), second))
    return replace(scenario(fsdp), training=replace(TRAINING, model=model))


@pytest.mark.parametrize("wrapping", list(Wrapping))
def test_frozen_parameters_that_are_ignored_are_gathered_nowhere(wrapping: Wrapping) -> None:
    """Each rank has them whole, and all-gathers are of the second layer's parameters alone."""
    gathered = []
    for ignore in (False, True):
        verdict = require_predicted(with_frozen_layer(FSDP2(wrapping=wrapping, ignore_frozen=ignore)))
        calls = [call for call in verdict.calls[0] if call.op == "all_gather"]
        gathered.append([call.num_bytes for call in calls])
    both, second = gathered
    assert (sum(second) < sum(both), len(set(second))) == (True, 1)


def test_ignored_parameters_are_not_cast() -> None:
    """Their layer would get inputs of another element type, so such a layout trains no frozen layer."""
    layout = with_frozen_layer(FSDP2(ignore_frozen=True, mixed_precision=LOW))

    assert check(layout).outcome is Outcome.UNSUPPORTED


def gathers(fsdp: FSDP2) -> int:
    """All-gathers of a rank in two steps of two microbatches, of which each is predicted."""
    verdict = require_predicted(scenario(replace(fsdp, wrapping=Wrapping.PER_LAYER)))
    return sum(call.op == "all_gather" for call in verdict.calls[0])


@pytest.mark.parametrize(("after_forward", "fewer"), [(True, 16 - 12), (False, 8 - 4)])
def test_parameters_that_stay_after_backward_are_not_gathered_for_the_next_microbatch(after_forward: bool, fewer: int) -> None:
    """They are freed after the last, as they are those of the step before once the optimizer has run."""
    freed = FSDP2(reshard_after_forward=after_forward)
    assert gathers(freed) - gathers(replace(freed, reshard_after_backward=False)) == fewer


def test_parameters_that_are_never_freed_are_found() -> None:
    """What forward computes with from the second step on is what the optimizer has updated shards of, and did not see."""

    def never(setup: Setup) -> None:
        setup.accumulation = lambda _last: nullcontext(setup.model.set_reshard_after_backward(False))  # type: ignore[operator]

    first = first_divergence(check(scenario(FSDP2(reshard_after_forward=False, reshard_after_backward=False)), alter=never))
    assert (first.step, first.phase) == (1, Phase.LOSS)


@pytest.mark.parametrize("fsdp", [FSDP2(), FSDP2(reshard_after_forward=False, no_sync=True), FSDP2(reshard_to=2)])
def test_gathering_ahead_of_time_changes_neither_numbers_nor_calls(fsdp: FSDP2) -> None:
    """Three layers, the last of them a unit that follows none."""
    training = replace(TRAINING, model=Model(features=3, layers=(Layer(width=3), Layer(width=2), Layer(width=4))))
    ours = replace(scenario(replace(fsdp, wrapping=Wrapping.PER_LAYER, explicit_prefetch=True)), training=training)
    require_predicted(ours)


@pytest.mark.parametrize(
    "fsdp", [FSDP2(), FSDP2(reshard_after_forward=False), FSDP2(explicit_prefetch=True), FSDP2(reshard_to=2)]
)
def test_what_was_gathered_ahead_and_not_needed_does_not_stay(fsdp: FSDP2) -> None:
    """Backward asks for the frozen first layer before it ends with the second; the next forward gathers it again.

    Over two ranks, if these have it: forward has left it so, and no backward frees it.
    """
    ours = with_frozen_layer(replace(fsdp, wrapping=Wrapping.PER_LAYER, reshard_after_backward=False))
    require_predicted(ours)


@pytest.mark.parametrize(("count", "gathered"), [(1, 16), (2, 8), (3, 8)])
def test_layers_of_one_unit_are_gathered_and_reduced_together(count: int, gathered: int) -> None:
    """Two layers in one unit take half of the calls of two units, and no more layers than there are."""
    assert gathers(FSDP2(wrapping=Wrapping.PER_LAYER, layers_per_unit=count)) == gathered


@pytest.mark.parametrize("count", [2, 3])
def test_units_of_several_layers_gather_their_neighbours_ahead_of_time(count: int) -> None:
    """The last unit has the layers that are left."""
    training = replace(TRAINING, model=Model(features=3, layers=(Layer(width=3), Layer(width=2), Layer(width=4), Layer(width=2))))
    fsdp = FSDP2(wrapping=Wrapping.PER_LAYER, layers_per_unit=count, explicit_prefetch=True, reshard_after_backward=False)
    require_predicted(replace(scenario(fsdp), training=training))


@pytest.mark.skipif(is_torch_in("<2.13"), reason="FSDPModule.set_separate_reduce_scatter_group exists since torch 2.13")
@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 2), (2, 1), (1,)], ids=str)
def test_a_group_for_reductions_alone_changes_neither_numbers_nor_calls(sizes: tuple[int, ...]) -> None:
    """On an axis of one rank there is nothing to reduce over it."""
    require_predicted(scenario(FSDP2(wrapping=Wrapping.PER_LAYER, separate_reduce_group=True), *sizes))


@pytest.mark.skipif(is_torch_in("<2.13"), reason="FSDPModule.set_separate_reduce_scatter_group exists since torch 2.13")
def test_reductions_over_a_group_of_their_own_are_its_first_calls() -> None:
    """Each group counts its calls: those of gathers do not count among those of reductions."""
    verdict = check(scenario(FSDP2(separate_reduce_group=True)))
    indices = [call.index for call in verdict.calls[0] if call.op.startswith("reduce_scatter")]
    assert indices == list(range(len(indices)))
    assert [call.index for call in verdict.calls[0] if call.op == "all_gather"][:2] == [0, 1]


@pytest.mark.slow
@pytest.mark.skipif(is_torch_in("<2.13"), reason="FSDPModule.set_separate_reduce_scatter_group exists since torch 2.13")
def test_kept_processes_make_a_group_for_reductions_again_and_again() -> None:
    """Each has the name of the last in torch 2.13, which was destroyed: from one check to the next nothing is left of it."""
    fsdp = FSDP2(wrapping=Wrapping.PER_LAYER, separate_reduce_group=True)
    outcomes = [check(scenario(fsdp, *sizes), world="gloo", deadline=20.0).outcome for sizes in [(4,), (2, 2)] * 5]
    assert set(outcomes) == {Outcome.EQUIVALENT}


@pytest.mark.parametrize("sizes", [(1,), (1, 1), (1, 2), (2, 1), (1, 4), (4, 1)], ids=str)
@pytest.mark.parametrize(
    "fsdp",
    [
        replace(PER_LAYER, reshard_after_backward=False),
        replace(PER_LAYER, reshard_after_forward=False, reshard_after_backward=False),
        replace(PER_LAYER, explicit_prefetch=True),
        replace(PER_LAYER, layers_per_unit=2),
        replace(PER_LAYER, layers_per_unit=2, explicit_prefetch=True, reshard_after_backward=False),
    ],
    ids=["kept_after_backward", "never_resharded", "ahead_of_time", "units_of_two", "all_of_it"],
)
def test_an_axis_of_one_rank_changes_nothing(fsdp: FSDP2, sizes: tuple[int, ...]) -> None:
    """Where shards are whole, or nothing is replicated, numbers and calls are still as expected."""
    training = replace(TRAINING, model=Model(features=3, layers=(Layer(width=3), Layer(width=2), Layer(width=4))))
    require_predicted(replace(scenario(fsdp, *sizes), training=training))


@pytest.mark.parametrize("reshard", [{}, {"reshard_after_forward": False}, {"reshard_to": 2}, {"reshard_after_backward": False}])
def test_units_can_be_gathered_before_forward(reshard: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank calls `unshard` on two layers and the root in each of four microbatches; no collective is added."""
    modules: list[FSDPModule] = []
    original = FSDPModule.unshard
    monkeypatch.setattr(FSDPModule, "unshard", lambda self, **options: modules.append(self) or original(self, **options))
    fsdp = replace(PER_LAYER, explicit_unshard=True, explicit_prefetch=True, **reshard)
    require_predicted(scenario(fsdp))
    assert len(modules) == 4 * 3 * 4
    assert "unit.unshard(async_op=True)" in script_of(scenario(fsdp))
