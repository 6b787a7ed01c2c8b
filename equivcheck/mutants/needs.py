"""Which layouts a mutant may be planted in, and what it needs of a scenario: questions about nouns alone."""

from __future__ import annotations

from collections.abc import Callable

from equivcheck.layouts.composition.registry import COMPOSITIONS, TIMES
from equivcheck.scenario import DDP, SGD, Compression, Layout, Precision, Replicate, Replicator, Scenario
from equivcheck.scenario.parallelism import PARALLELISMS

EVERYWHERE: tuple[str, ...] = (*(kind.tag for kind in PARALLELISMS), *COMPOSITIONS)
"""Every layout that ships with the package."""
WRAPPED = ("ddp", "replicate", "ddp x tensor_parallel", "replicate x tensor_parallel")
"""Layouts in which a `DistributedDataParallel` may reduce gradients."""
OVER_OTHERS = ("ddp x tensor_parallel", "replicate x tensor_parallel", "fsdp1 x tensor_parallel", "fsdp2 x tensor_parallel")
"""Layouts in which some ranks compute on the same rows."""
DATA_PARALLEL = ("ddp", "replicate", "fsdp1", "fsdp2", *OVER_OTHERS)
"""Layouts in which ranks average gradients."""
LEAST_VISIBLE_RATE = 1e-3
"""The least learning rate at which, in float32, an update is well above the rounding of what it updates."""


def within(*tags: str) -> tuple[str, ...]:
    """Every layout that has one of these parallelisms, those of one parallelism first."""
    return tuple(name for name in EVERYWHERE if not set(name.split(TIMES)).isdisjoint(tags))


def all_of(*conditions: Callable[[Scenario], bool]) -> Callable[[Scenario], bool]:
    """Whether all of several conditions hold."""
    return lambda scenario: all(condition(scenario) for condition in conditions)


def is_eager(scenario: Scenario) -> bool:
    """Whether hooks are called as they are registered.

    A compiled module has taken in those that were there when it was traced, and of a step traced to one graph the update does not
    see what becomes of gradients between.
    """
    return not any(layout.execution.is_compiled or layout.execution.whole_step for layout in scenario.layouts)


def has_ranks(scenario: Scenario) -> bool:
    """Whether there are several ranks."""
    return scenario.layout.mesh.num_ranks > 1


def has_data_ranks(scenario: Scenario) -> bool:
    """Whether hooks are called, and several ranks compute on different rows."""
    return is_eager(scenario) and scenario.layout.num_data_ranks > 1


def has_microbatches(scenario: Scenario) -> bool:
    """Whether hooks are called, and gradients of several microbatches are accumulated."""
    return is_eager(scenario) and len(scenario.training.data.microbatches) > 1


def has_steps(scenario: Scenario) -> bool:
    """Whether hooks are called, and the layout itself runs several steps."""
    return is_eager(scenario) and runs_steps(scenario)


def runs_steps(scenario: Scenario) -> bool:
    """Whether the layout that is named runs several steps, not counting those before a checkpoint."""
    before = 0 if scenario.resume is None else scenario.resume.steps
    return scenario.training.steps - before > 1


def keeps_state(scenario: Scenario) -> bool:
    """Whether the optimizer keeps anything between steps."""
    optimizer = scenario.training.optimizer
    return not (isinstance(optimizer, SGD) and optimizer.momentum == 0.0)


def is_wrapped(layout: Layout) -> bool:
    """Whether a `DistributedDataParallel` is in a layout."""
    return layout.has(DDP) or any(parallelism.implementation is Replicator.DDP for parallelism in layout.of(Replicate))


def reduces_by_hooks(scenario: Scenario) -> bool:
    """Whether several ranks reduce gradients by a `DistributedDataParallel`, and no hook has been registered for that yet."""
    compressed = any(
        isinstance(parallelism, DDP | Replicate) and parallelism.compression is not Compression.NONE
        for layout in scenario.layouts
        for parallelism in layout.parallelisms
    )
    return has_data_ranks(scenario) and is_wrapped(scenario.layout) and not compressed


def updates_exceed_rounding(scenario: Scenario) -> bool:
    """Whether an update is more than rounding: in float32, one at a rate of 5e-5 and of twice that may be the same numbers."""
    return scenario.training.precision is Precision.FLOAT64 or scenario.training.optimizer.lr >= LEAST_VISIBLE_RATE
