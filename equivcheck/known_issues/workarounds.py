"""How upstream issues on file are avoided: what is wrong without one as well is not that one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from equivcheck.layouts.limits.repairs import with_execution
from equivcheck.scenario import Compile, Implementation, Layout, Loss, Scenario


def plain_implementation(scenario: Scenario) -> Scenario:
    """The optimizer updates one parameter after the other, an operation at a time; not in a graph, which may not hold that."""
    optimizer = replace(scenario.training.optimizer, implementation=Implementation.FOR_LOOP)
    resume = scenario.resume and replace(scenario.resume, layout=with_execution(scenario.resume.layout, whole_step=False))
    return replace(
        scenario,
        training=replace(scenario.training, optimizer=optimizer),
        layout=with_execution(scenario.layout, whole_step=False),
        resume=resume,
    )


def nothing_kept_on_disk(scenario: Scenario) -> Scenario:
    """What Inductor would compile stays with Dynamo and AOTAutograd, in memory."""
    resume = scenario.resume and replace(scenario.resume, layout=_without_inductor(scenario.resume.layout))
    return replace(scenario, layout=_without_inductor(scenario.layout), resume=resume)


def _without_inductor(layout: Layout) -> Layout:
    if layout.execution.compile is not Compile.INDUCTOR:
        return layout
    return with_execution(layout, compile=Compile.AOT_EAGER)


def summed_outputs(scenario: Scenario) -> Scenario:
    """The loss is the sum of outputs less targets where it is their mean."""
    return replace(scenario, training=replace(scenario.training, loss=Loss.LINEAR_SUM))


WITHOUT: dict[str, Callable[[Scenario], Scenario]] = {
    change.__name__: change for change in (plain_implementation, nothing_kept_on_disk, summed_outputs)
}
"""Changes of a scenario, by name: the issue cannot show in what they leave, and all else is as it was."""
