"""Real checks of small scenarios, some of which have a known fault: importable by workers."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from equivcheck.campaign.plan import Plan, oracle_check
from equivcheck.mutants.registry import mutant
from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.scenario import DDP, SGD, Axis, Data, Layer, Layout, Mesh, Model, Scenario, Training


def some_scenarios(_: Plan) -> st.SearchStrategy[Scenario]:
    """DDP on two ranks, quick to check."""
    return st.builds(
        _scenario, width=st.integers(1, 32), layers=st.integers(1, 3), steps=st.integers(1, 3), seed=st.integers(0, 99)
    )


def _scenario(*, width: int, layers: int, steps: int, seed: int) -> Scenario:
    training = Training(
        model=Model(features=2, layers=(Layer(width=width),) * layers),
        data=Data(microbatches=(2,)),
        optimizer=SGD(),
        steps=steps,
        seed=seed,
    )
    return Scenario(training=training, layout=Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=(DDP(),)))


def is_faulty(scenario: Scenario) -> bool:
    """Whether the fault is planted there."""
    return len(scenario.training.model.layers) == 3


def check(scenario: Scenario, *, alter: Any = None, **options: Any) -> CaseVerdict:
    """The verdict on a scenario, with gradients summed over the ranks where it has three layers."""
    if alter is None and is_faulty(scenario):
        alter = mutant("gradients_summed").plant
    return oracle_check(scenario, alter=alter, **options)
