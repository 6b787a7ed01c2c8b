"""What a run leaves in memory."""

from __future__ import annotations

import gc
import itertools

from torch import nn

from equivcheck import Scenario, check
from equivcheck.scenario import FSDP1, AuxiliaryLinear, Axis, Data, Layer, Layout, Mesh, Model, Training, Wrapping

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
    """Linears alive after everything that can be collected has been."""
    gc.collect()
    return sum(issubclass(type(thing), nn.Linear) for thing in gc.get_objects())


def test_fsdp1_leaves_no_module_behind() -> None:
    """However a model was wrapped, its modules are gone after the run."""
    for scenario in SCENARIOS:
        check(scenario)
    before = num_linears()

    for _ in range(3):
        for scenario in SCENARIOS:
            check(scenario)

    assert num_linears() - before < len(SCENARIOS)
