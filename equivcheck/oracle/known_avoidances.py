"""How upstream issues on file are avoided: what is wrong without one as well is not that one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from equivcheck.scenario import Implementation, Scenario


def plain_implementation(scenario: Scenario) -> Scenario:
    """The optimizer updates one parameter after the other, an operation at a time."""
    optimizer = replace(scenario.training.optimizer, implementation=Implementation.FOR_LOOP)
    return replace(scenario, training=replace(scenario.training, optimizer=optimizer))


WITHOUT: dict[str, Callable[[Scenario], Scenario]] = {plain_implementation.__name__: plain_implementation}
"""Changes of a scenario, by name: the issue cannot show in what they leave, and all else is as it was."""
