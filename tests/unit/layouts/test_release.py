"""Objects and groups that a run leaves behind."""

from __future__ import annotations

import gc
import itertools

import pytest
from torch import nn

from equivcheck import Scenario, check
from equivcheck.scenario import FSDP1, FSDP2, AuxiliaryLinear, Axis, Data, Layer, Layout, Mesh, Model, Training, Wrapping
from equivcheck.worlds.pool import ranks
from support.groups_left import num_groups_left

MESH = Mesh(axes=(Axis(name="dp", size=2),))
SCENARIOS = [
    Scenario(
        training=Training(
            model=Model(features=4, layers=(Layer(width=4, frozen=frozen, auxiliary=auxiliary), Layer(width=2))),
            data=Data(microbatches=(2, 2)),
        ),
        layout=Layout(mesh=MESH, parallelisms=(FSDP1(wrapping=wrapping, use_orig_params=original, no_sync=no_sync),)),
    )
    for frozen, auxiliary, wrapping, original, no_sync in itertools.product(
        (False, True), (None, AuxiliaryLinear.EVEN_STEPS), Wrapping, (False, True), (False, True)
    )
]


def num_linears() -> int:
    """Number of linears that survive garbage collection."""
    gc.collect()
    return sum(issubclass(type(thing), nn.Linear) for thing in gc.get_objects())


def test_fsdp1_leaves_no_module_behind() -> None:
    """No module survives a run with FSDP1."""
    for scenario in SCENARIOS:
        check(scenario)
    before = num_linears()

    for _ in range(3):
        for scenario in SCENARIOS:
            check(scenario)

    assert num_linears() - before < len(SCENARIOS)


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_fsdp2_leaves_no_groups_behind(world: str) -> None:
    """No process group survives a run with FSDP2 that reshards to fewer ranks; each group has threads and sockets."""
    mesh = Mesh(axes=(Axis(name="dp", size=4),))
    layout = Layout(mesh=mesh, parallelisms=(FSDP2(wrapping=Wrapping.PER_LAYER, reshard_to=2),))
    training = Training(model=Model(features=4, layers=(Layer(width=4),)), data=Data(microbatches=(4,)))
    scenario = Scenario(training=training, layout=layout)

    assert ranks(world, 4).run(num_groups_left, scenario).values == (0,) * 4
