"""One rank in a world without peers."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from equivcheck import UsageError, World, check
from equivcheck.layouts.composition.program import rank_program
from equivcheck.scenario import (
    FSDP2,
    ActivationSharding,
    Axis,
    ClipNorm,
    Data,
    Layer,
    LayerPlan,
    Layout,
    Mesh,
    Model,
    Scenario,
    Split,
    TensorParallel,
    Training,
)
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.fake.ranks import FakeRanks
from equivcheck.worlds.pool import ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch warns of is of no interest here


def scenario(dp: int, tp: int) -> Scenario:
    """FSDP2 x TP over two layers."""
    mesh = Mesh(axes=(Axis(name="dp", size=dp), Axis(name="tp", size=tp)))
    plan = (LayerPlan(split=Split.COLWISE, output=ActivationSharding.FEATURES), LayerPlan(split=Split.ROWWISE))
    return Scenario(
        training=Training(
            model=Model(features=16, layers=(Layer(width=32), Layer(width=16))),
            data=Data(microbatches=(2 * dp,)),
            clipping=ClipNorm(max_norm=1.0),
            steps=2,
        ),
        layout=Layout(mesh=mesh, parallelisms=(TensorParallel(plan=plan), FSDP2())),
    )


def test_calls_are_those_of_a_world_with_peers() -> None:
    """A rank without peers issues the calls that it issues among peers."""
    small = scenario(2, 2)
    assert FakeRanks(4).run(rank_program, small).calls[0] == ranks("sim", 4).run(rank_program, small).calls[0]


@pytest.mark.parametrize("rank", [0, 1, 4095])
def test_any_rank_of_thousands_trains(rank: int) -> None:
    """A plan for 4,096 ranks builds and trains, with groups of the mesh's sizes."""
    big = scenario(512, 8)
    (calls,) = FakeRanks(4096, rank).run(rank_program, big).calls
    assert {len(call.ranks) for call in calls} == {512, 8}
    assert all(rank in call.ranks for call in calls)


def test_what_comes_back_has_the_right_shape() -> None:
    """Gathered tensors repeat the rank's own values for each member."""

    def program() -> list[float]:
        mesh = init_device_mesh("cpu", (3, 5), mesh_dim_names=("dp", "tp"))
        gathered = torch.zeros(10)
        dist.all_gather_into_tensor(gathered, torch.tensor([1.0, 2.0]), group=mesh.get_group("tp"))
        return gathered.tolist()

    with World("fake", size=15) as world:
        assert world.run(program).values == ([1.0, 2.0] * 5,)


def test_what_the_rank_raises_is_reported() -> None:
    """An error names the rank, and the next run works."""

    def program() -> None:
        raise KeyError("weight")

    world = FakeRanks(100, 7)
    with pytest.raises(RanksFailed, match="KeyError: 'weight'") as caught:
        world.run(program)
    assert [report.rank for report in caught.value.failure.reports] == [7]
    assert world.run(dist.get_rank).values == (7,)


def test_a_rank_outside_the_world_is_refused() -> None:
    """The error names the valid ranks."""
    with pytest.raises(UsageError, match=r"rank 8 is not valid: the world has 8 ranks\. Expected 0 to 7"):
        FakeRanks(8, 8)


def test_nothing_is_checked_without_data() -> None:
    """A check needs real values, and the error names the worlds with them."""
    with pytest.raises(
        UsageError, match=r"world 'fake' is not valid: its collectives transfer no data to compare\. Expected one of sim, gloo"
    ):
        check(scenario(2, 2), world="fake")
