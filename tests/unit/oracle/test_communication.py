"""Communication is compared with the expected calls, even if every number is right."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from equivcheck import Outcome, Scenario, check
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SPMD,
    Activation,
    AuxiliaryLinear,
    Axis,
    Checkpointing,
    ClipNorm,
    Data,
    Distribution,
    Execution,
    Layer,
    LayerPlan,
    Layout,
    LocalTensorParallel,
    Loss,
    Mesh,
    Model,
    NormType,
    Parallelism,
    Precision,
    Split,
    TensorParallel,
    Training,
    Wrapping,
)
from equivcheck.training.setup import Setup
from equivcheck.worlds.call import Call
from equivcheck.worlds.trace.differences import Difference, Divergence, Phase
from support.supported import require_mended
from unit.oracle.alterations import double_the_gradients

TRAINING = Training(
    model=Model(features=2, layers=(Layer(width=2), Layer(width=1))), data=Data(microbatches=(4, 2)), steps=2, clipping=ClipNorm()
)


def scenario(parallelism: Parallelism, training: Training = TRAINING) -> Scenario:
    """A training on two ranks."""
    return Scenario(training=training, layout=Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=(parallelism,)))


def reduce_once_more(setup: Setup) -> None:
    """Let ranks add up zeros before each update."""
    setup.before_update.append(lambda _optimizer, _step: dist.all_reduce(torch.zeros(3)) and None)


def reduce_once_more_on_rank_one(setup: Setup) -> None:
    """Let rank 1 reduce over itself in step 1."""
    alone = dist.new_group([1])

    def tell(_optimizer: object, step: int) -> None:
        if dist.get_rank() == 1 and step == 1:
            dist.all_reduce(torch.zeros(1), group=alone)

    setup.before_update.append(tell)


def reduce_by_parameter(setup: Setup) -> None:
    """Average gradients correctly, but one by one instead of in DDP's buckets."""
    assert isinstance(setup.module, DistributedDataParallel)
    module = setup.module
    setup.accumulation = lambda _last: module.no_sync()

    def reduce(_optimizer: object, _step: int) -> None:
        for parameter in setup.model.parameters():
            dist.all_reduce(parameter.grad.div_(dist.get_world_size()))

    setup.before_update.append(reduce)


def reduce_in_double(setup: Setup) -> None:
    """Average float32 gradients in float64: right, but with twice the bytes."""
    assert isinstance(setup.module, DistributedDataParallel)
    group = setup.module.process_group

    def average(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        wide = bucket.buffer().double().div_(group.size())
        future = dist.all_reduce(wide, group=group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0].float())  # type: ignore[no-any-return]

    setup.module.register_comm_hook(None, average)


def gather_again(setup: Setup) -> None:
    """Let FSDP2 free all layers after forward, against the layout's option."""
    setup.model.set_reshard_after_forward(True)  # type: ignore[operator]


SINGLE = replace(TRAINING, precision=Precision.FLOAT32)
FAULTS: dict[str, tuple[Scenario, Callable[[Setup], None], str, str, str]] = {
    "an extra call": (scenario(FSDP2()), reduce_once_more, "all_reduce.sum over dp in compute", "no call", "1 call, 12 bytes"),
    "buckets left out": (
        scenario(DDP(no_sync=True)),
        reduce_by_parameter,
        "all_reduce.sum over dp in compute",
        "1 call",
        "4 calls",
    ),
    "wide gradients": (scenario(DDP(), SINGLE), reduce_in_double, "all_reduce.sum over dp in compute", "72 bytes", "144 bytes"),
    "gathered again": (
        scenario(FSDP2(wrapping=Wrapping.PER_LAYER, reshard_after_forward=False)),
        gather_again,
        "all_gather over dp in compute",
        "4 calls",
        "8 calls",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_right_numbers_by_other_calls_have_diverged(fault: str) -> None:
    """An extra, a missing, a wider or a repeated call is a divergence with expected and actual calls."""
    plan, alter, tensor, expected, actual = FAULTS[fault]
    honest = check(plan)
    require_mended(honest)
    assert honest.outcome is Outcome.EQUIVALENT

    verdict = check(plan, alter=alter)

    assert verdict.outcome is Outcome.DIVERGED
    found = verdict.divergence
    assert found is not None
    assert (found.step, found.phase, found.tensor, found.rank) == (0, Phase.COMMUNICATION, tensor, 0)
    assert expected in found.expected
    assert actual in found.actual
    assert found.difference is (Difference.BYTES if fault == "wide gradients" else Difference.CALLS)


@pytest.mark.torch(">=2.10", "earlier versions communicate on one rank where others do not, which is not compared")
def test_every_rank_is_heard() -> None:
    """A call on one rank only, at the last step only, is found."""
    found = check(scenario(DDP()), alter=reduce_once_more_on_rank_one).divergence

    assert isinstance(found, Divergence)
    assert (found.step, found.rank, found.tensor) == (1, 1, "all_reduce.sum over one rank in compute")


def test_numbers_come_before_calls() -> None:
    """If both differ in a step, the first divergence is a number."""

    def both(setup: Setup) -> None:
        reduce_once_more(setup)
        double_the_gradients(setup)

    verdict = check(scenario(DDP()), alter=both)

    assert verdict.divergence is not None
    assert verdict.divergence.phase is Phase.GRADIENT
    assert any("communication" in follower for follower in verdict.followers)


def test_what_is_not_compared_is_said() -> None:
    """A world that sees no calls gives a reason, and so does a layout whose communication propagation decides."""
    assert check(scenario(DDP())).unmodelled == ""
    assert check(scenario(DDP()), world="gloo").unmodelled == "world gloo does not see calls"
    propagated = scenario(SPMD(distribution=Distribution.FULLY_SHARD), replace(TRAINING, loss=Loss.LINEAR_SUM))
    assert "propagation" in check(propagated).unmodelled


def test_a_verdict_has_the_calls() -> None:
    """The verdict has each rank's calls, in order of issue."""
    verdict = check(scenario(FSDP1(), SINGLE))

    assert [len(calls) for calls in verdict.calls] == [len(verdict.calls[0])] * 2
    assert all(isinstance(call, Call) for call in verdict.calls[1])
    assert [call.index for call in verdict.calls[0] if call.ranks == (0, 1)] == list(range(len(verdict.calls[0])))


def test_frozen_layers_outside_a_plan_have_no_norm_of_their_own() -> None:
    """Plain and DTensor gradients are clipped by two norms, unless one kind has no gradient."""
    training = Training(
        model=Model(features=4, layers=(Layer(width=4, frozen=True), Layer(width=4))),
        data=Data(microbatches=(2,)),
        clipping=ClipNorm(max_norm=0.01, norm_type=NormType.INF),
    )
    plan = (LayerPlan(split=Split.NOT_IN_PLAN), LayerPlan(split=Split.COLWISE))
    mesh = Mesh(axes=(Axis(name="dp", size=2), Axis(name="tp", size=2)))
    layout = Layout(mesh=mesh, parallelisms=(TensorParallel(plan=plan), FSDP2()))

    assert check(Scenario(training=training, layout=layout)).outcome is Outcome.EQUIVALENT


@pytest.mark.parametrize("auxiliary", [None, AuxiliaryLinear.NEVER, AuxiliaryLinear.EVEN_STEPS])
def test_a_layer_that_trains_nothing_in_a_step_is_not_recomputed(auxiliary: AuxiliaryLinear | None) -> None:
    """While its auxiliary linear does not run, it uses only a frozen layer's weight, and its input needs no gradient."""
    uses_frozen = Layer(width=4, bias=False, activation=Activation.RELU, shares=0, auxiliary=auxiliary)
    layers = (Layer(width=4, frozen=True), uses_frozen, Layer(width=4))
    training = Training(model=Model(features=4, layers=layers), data=Data(microbatches=(2,)), loss=Loss.LINEAR_SUM, steps=2)
    plan = LocalTensorParallel(plan=tuple(LayerPlan(split=split) for split in (Split.COLWISE, Split.COLWISE, Split.NOT_IN_PLAN)))
    mesh, execution = Mesh(axes=(Axis(name="tp", size=2),)), Execution(checkpointing=Checkpointing.EVERY_LAYER)
    layout = Layout(mesh=mesh, parallelisms=(plan,), execution=execution)

    assert check(Scenario(training=training, layout=layout)).outcome is Outcome.EQUIVALENT
