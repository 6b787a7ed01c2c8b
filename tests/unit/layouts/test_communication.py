"""Recorded calls, summed by stage and step."""

from __future__ import annotations

import torch
import torch.distributed as dist

from equivcheck.layouts.base.expected_calls.communication import axes_along, axes_of, traffic
from equivcheck.layouts.composition.program import rank_program
from equivcheck.scenario import DDP, FSDP2, Axis, ClipNorm, Data, Layer, Layout, Mesh, Model, Parallelism, Scenario, Training
from equivcheck.training.setup import Setup
from equivcheck.worlds.call import BEFORE_STEPS
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.trace.stage import Stage

MODEL = Model(features=2, layers=(Layer(width=3),))
MESH = Mesh(axes=(Axis(name="dp_replicate", size=2), Axis(name="dp_shard", size=2), Axis(name="tp", size=1)))


def scenario(parallelism: Parallelism, training: Training) -> Scenario:
    """A training on two ranks."""
    mesh = Mesh(axes=(Axis(name="dp", size=2),))
    return Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=(parallelism,)))


def test_a_call_knows_its_stage_and_step() -> None:
    """Calls before the first step, in compute, in clipping and in reading have different stages."""
    training = Training(model=MODEL, data=Data(microbatches=(2, 2)), clipping=ClipNorm(), steps=2)
    plan = scenario(FSDP2(), training)
    (calls, _) = ranks("sim", 2).run(rank_program, plan).calls

    found = [(each.step, each.stage, each.op) for each in traffic(calls, plan.layout.mesh) if each.step != BEFORE_STEPS]

    step = [(Stage.COMPUTE, "all_gather"), (Stage.COMPUTE, "reduce_scatter.sum"), (Stage.CLIPPING, "all_reduce.sum")]
    assert [entry for entry in found if entry[1] is not Stage.READING] == [(index, *call) for index in (0, 1) for call in step]


def test_bytes_and_calls_are_summed() -> None:
    """Nine float64 gradients, reduced for two microbatches, are two calls with 72 bytes each; one more call counts."""
    plan = scenario(DDP(), Training(model=MODEL, data=Data(microbatches=(2, 2))))
    (calls, _) = ranks("sim", 2).run(rank_program, plan, reduce_in_update).calls

    found = {(each.stage, each.op): each for each in traffic(calls, plan.layout.mesh)}

    assert found[Stage.COMPUTE, "all_reduce.sum"].describe() == "2 calls, 144 bytes"
    assert found[Stage.COMPUTE, "all_reduce.sum"].axes == "dp"
    assert found[Stage.UPDATE, "all_reduce.max"].describe() == "1 call, 8 bytes"


def reduce_in_update(setup: Setup) -> None:
    """Issue one more collective while the optimizer steps."""
    build = setup.build_optimizer

    def with_reduction(*arguments: object) -> object:
        optimizer = build(*arguments)  # type: ignore[arg-type]
        tensor = torch.zeros((), dtype=torch.float64)
        optimizer.register_step_pre_hook(lambda *_: dist.all_reduce(tensor, dist.ReduceOp.MAX))
        return optimizer

    setup.build_optimizer = with_reduction  # type: ignore[assignment]


def test_a_group_is_called_by_its_axes() -> None:
    """A group's name has its axes with more than one rank. A group outside the mesh is named by its ranks."""
    names = {
        (2,): "",
        (0, 1): "dp_shard",
        (1, 3): "dp_replicate",
        (0, 1, 2, 3): "dp_replicate x dp_shard",
        (0, 3): "ranks 0, 3",
        (0, 1, 2): "ranks 0, 1, 2",
    }
    assert {group: axes_of(group, MESH) for group in names} == names


def test_a_group_lies_along_the_axes_in_which_its_ranks_differ() -> None:
    """This holds for a group named by its axes, and for one named by its ranks."""
    assert axes_along("dp_replicate x dp_shard", MESH) == {"dp_replicate", "dp_shard"}
    assert axes_along("ranks 0, 3", MESH) == {"dp_replicate", "dp_shard"}
    assert axes_along("ranks 1, 3", MESH) == {"dp_replicate"}
