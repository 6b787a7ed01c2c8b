"""The fake world issues the same collectives as torch's own `fake` backend."""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from equivcheck.layouts.composition.program import rank_setup
from equivcheck.scenario import (
    FSDP1,
    FSDP2,
    ActivationSharding,
    Axis,
    Data,
    Layer,
    LayerPlan,
    Layout,
    Mesh,
    Model,
    Norm,
    Parallelism,
    Scenario,
    Split,
    TensorParallel,
    Training,
)
from equivcheck.training.loop import train
from equivcheck.worlds.fake.ranks import FakeRanks
from equivcheck.worlds.trace.stage import Stage

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch warns of is of no interest here

PAIRWISE = TensorParallel(
    plan=(LayerPlan(split=Split.COLWISE, output=ActivationSharding.FEATURES), LayerPlan(split=Split.ROWWISE))
)
SEQUENCE = TensorParallel(plan=(LayerPlan(split=Split.COLWISE, output=ActivationSharding.ROWS), LayerPlan(split=Split.ROWWISE)))
NAMES = {
    "all_gather_into_tensor": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_single_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter.sum",
    "_reduce_scatter_base_": "reduce_scatter.sum",
    "reduce_scatter_single_": "reduce_scatter.sum",
    "all_reduce": "all_reduce.sum",
    "allreduce_": "all_reduce.sum",
}
"""Our operation name by torch's operator name."""


class Collectives(TorchDispatchMode):
    """Counts the collectives dispatched by torch."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the operator and execute it."""
        if func.namespace in ("c10d", "_c10d_functional") and func.overloadpacket.__name__ in NAMES:
            self.counts[NAMES[func.overloadpacket.__name__]] += 1
        return func(*args, **(kwargs or {}))


def under_torch_fake(program: Callable[[], Any], rank: int, size: int) -> Any:
    """Run a program under the `fake` backend, in a new thread so that no mesh stays cached for others."""
    results: list[Any] = []

    def serve() -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            results.append(program())
        finally:
            dist.destroy_process_group()

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    (result,) = results
    return result


def counted(scenario: Scenario) -> Counter[str]:
    """All steps' collectives by name, as torch dispatches them."""
    setup = rank_setup(scenario)
    with Collectives() as seen:
        train(setup)
    setup.release()
    return seen.counts


@pytest.mark.parametrize("tp_plan", [PAIRWISE, SEQUENCE], ids=["pairwise", "sequence"])
@pytest.mark.parametrize("data_parallel", [FSDP2(), FSDP1()], ids=["fsdp2", "fsdp1"])
def test_tensor_parallel_inside_fsdp_trains_under_both(tp_plan: TensorParallel, data_parallel: Parallelism) -> None:
    """For any mesh size, model and rank, training issues the collectives counted under torch's `fake`."""

    @settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(dp=st.integers(2, 64), tp=st.sampled_from([2, 4, 8]), width=st.integers(1, 4), data=st.data())
    def same(dp: int, tp: int, width: int, data: st.DataObject) -> None:
        mesh = Mesh(axes=(Axis(name="dp", size=dp), Axis(name="tp", size=tp)))
        layers = (Layer(width=8 * width), Layer(width=8, norm=Norm.RMS if tp_plan is SEQUENCE else None))
        training = Training(model=Model(features=8, layers=layers), data=Data(microbatches=(dp * tp,)), steps=10)
        scenario = Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=(tp_plan, data_parallel)))
        rank = data.draw(st.integers(0, dp * tp - 1))
        (calls,) = FakeRanks(dp * tp, rank).run(lambda: train(rank_setup(scenario))).calls
        ours = Counter(call.op for call in calls if call.stage is not Stage.SETUP)
        assert ours == under_torch_fake(lambda: counted(scenario), rank, dp * tp)
        assert ours["all_gather"] > 0

    same()
