"""What a mutant needs of a scenario: questions about nouns alone."""

from __future__ import annotations

from equivcheck.scenario import DDP, Compression, Layout, Replicate, Replicator, Scenario
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD

DATA_AXES = (DP, REPLICATE, SHARD)
"""Axes along which ranks compute on different rows."""


def is_eager(scenario: Scenario) -> bool:
    """Whether hooks are called as they are registered.

    A compiled module has taken in those that were there when it was traced, and of a step traced to one graph the update does not
    see what becomes of gradients between.
    """
    return not any(layout.execution.is_compiled or layout.execution.whole_step for layout in scenario.layouts)


def has_data_ranks(scenario: Scenario) -> bool:
    """Whether hooks are called, and several ranks compute on different rows."""
    return is_eager(scenario) and scenario.layout.num_data_ranks > 1


def has_microbatches(scenario: Scenario) -> bool:
    """Whether hooks are called, and gradients of several microbatches are accumulated."""
    return is_eager(scenario) and len(scenario.training.data.microbatches) > 1


def has_steps(scenario: Scenario) -> bool:
    """Whether hooks are called, and the layout itself runs several steps."""
    before = 0 if scenario.start is None else scenario.start.steps
    return is_eager(scenario) and scenario.training.steps - before > 1


def reduces_by_hooks(scenario: Scenario) -> bool:
    """Whether several ranks reduce gradients by a `DistributedDataParallel`, and no hook has been registered for that yet."""
    compressed = any(
        isinstance(parallelism, DDP | Replicate) and parallelism.compression is not Compression.NONE
        for layout in scenario.layouts
        for parallelism in layout.parallelisms
    )
    return has_data_ranks(scenario) and is_wrapped(scenario.layout) and not compressed


def is_wrapped(layout: Layout) -> bool:
    """Whether a `DistributedDataParallel` is in a layout."""
    return any(
        isinstance(parallelism, DDP) or (isinstance(parallelism, Replicate) and parallelism.implementation is Replicator.DDP)
        for parallelism in layout.parallelisms
    )
