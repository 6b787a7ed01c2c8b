"""Checks and scenarios for campaigns, importable by workers."""

from __future__ import annotations

import os
import signal
import time

from hypothesis import strategies as st

from equivcheck.campaign.plan import Plan
from equivcheck.oracle.verdict import Difference, Divergence, Outcome, Phase, Verdict
from equivcheck.scenario import DDP, Axis, Data, Layer, Layout, Mesh, Model, Scenario, Training


def scenario(*, width: int = 1, steps: int = 1, ranks: int = 2, layers: int = 1) -> Scenario:
    """A small scenario of DDP."""
    model = Model(features=1, layers=(Layer(width=width),) * layers)
    training = Training(model=model, data=Data(microbatches=(ranks,)), steps=steps)
    return Scenario(training=training, layout=Layout(mesh=Mesh(axes=(Axis(name="dp", size=ranks),)), parallelisms=(DDP(),)))


def some_scenarios(_: Plan) -> st.SearchStrategy[Scenario]:
    """Few enough to be quick, many enough to shrink."""
    return st.builds(
        scenario, width=st.integers(1, 32), steps=st.integers(1, 5), ranks=st.integers(1, 8), layers=st.integers(1, 5)
    )


def two_scenarios(_: Plan) -> st.SearchStrategy[Scenario]:
    """Soon exhausted."""
    return st.builds(scenario, width=st.integers(1, 2))


def fine(scenario: Scenario, *, world: str, deadline: float, **_options: object) -> Verdict:
    """Finds nothing."""
    time.sleep(0.001)
    return Verdict(outcome=Outcome.EQUIVALENT, scenario=scenario, world=world)


def wide_diverges(scenario: Scenario, *, world: str, deadline: float, **_options: object) -> Verdict:
    """Finds the same fault wherever the first layer has at least 3 outputs."""
    if scenario.training.model.layers[0].width < 3:
        return fine(scenario, world=world, deadline=deadline)
    return diverged(scenario, world=world)


def diverged(scenario: Scenario, *, world: str = "sim", tensor: str = "layers.0.linear.weight", step: int = 0) -> Verdict:
    """A verdict of a wrong gradient."""
    divergence = Divergence(step=step, phase=Phase.GRADIENT, tensor=tensor, difference=Difference.VALUE, rank=0, error=9.0)
    return Verdict(outcome=Outcome.DIVERGED, scenario=scenario, world=world, reason=f"{tensor} differs", divergence=divergence)


def long_exits(scenario: Scenario, *, world: str, deadline: float, **_options: object) -> Verdict:
    """Takes its process down with scenarios of five steps."""
    if scenario.training.steps == 5:
        os._exit(7)
    return fine(scenario, world=world, deadline=deadline)


def wide_dies(scenario: Scenario, *, world: str, deadline: float, **_options: object) -> Verdict:
    """Takes its process down where the first layer has at least 3 outputs."""
    if scenario.training.model.layers[0].width >= 3:
        os._exit(7)
    return fine(scenario, world=world, deadline=deadline)


def long_is_killed(scenario: Scenario, *, world: str, deadline: float, **_options: object) -> Verdict:
    """Is killed, as by a segmentation fault, with scenarios of five steps."""
    if scenario.training.steps == 5:
        os.kill(os.getpid(), signal.SIGSEGV)
    return fine(scenario, world=world, deadline=deadline)


def long_hangs(scenario: Scenario, *, world: str, deadline: float, **_options: object) -> Verdict:
    """Never comes back from scenarios of five steps."""
    while scenario.training.steps == 5:
        time.sleep(1)
    return fine(scenario, world=world, deadline=deadline)


def raises(scenario: Scenario, *, world: str, deadline: float, **_options: object) -> Verdict:
    """Is broken itself."""
    raise RuntimeError("no such thing")


def dies_at_import(_: Plan) -> st.SearchStrategy[Scenario]:
    """Takes its process down before any check."""
    print("the disk is on fire", flush=True)
    os._exit(9)
