"""Conditions on scenarios and layouts that mutants need."""

from __future__ import annotations

from collections.abc import Callable

from equivcheck.layouts.composition.registry import COMPOSITIONS, TIMES
from equivcheck.layouts.parallelisms.pipeline.stages import splits_backward
from equivcheck.scenario import DDP, SGD, Compression, Layout, Pipeline, Precision, Replicate, Replicator, Scenario
from equivcheck.scenario.parallelisms import PARALLELISMS

EVERYWHERE: tuple[str, ...] = (*(kind.tag for kind in PARALLELISMS), *COMPOSITIONS)
"""Every built-in layout."""
WITH_DDP = ("ddp", "replicate", "ddp x tensor_parallel", "replicate x tensor_parallel")
"""Layouts that can use `DistributedDataParallel`."""
WITH_DDP_STAGES = (*WITH_DDP, "ddp x pipeline")
"""Layouts whose model, or each of its pipeline stages, `DistributedDataParallel` can wrap."""
INNER_TENSOR_PARALLEL = (
    "ddp x tensor_parallel",
    "replicate x tensor_parallel",
    "fsdp1 x tensor_parallel",
    "fsdp2 x tensor_parallel",
)
"""Layouts with tensor parallelism inside data parallelism, so that some ranks compute on the same rows."""
DATA_PARALLEL = ("ddp", "replicate", "fsdp1", "fsdp2", *INNER_TENSOR_PARALLEL)
"""Layouts that average gradients over ranks with different rows."""
LEAST_VISIBLE_RATE = 1e-3
"""Smallest learning rate whose float32 updates clearly exceed rounding."""


def layouts_with(*tags: str) -> tuple[str, ...]:
    """Return the names of all layouts that contain a parallelism in `tags`. Layouts with one parallelism come first."""
    return tuple(name for name in EVERYWHERE if not set(name.split(TIMES)).isdisjoint(tags))


def all_of(*conditions: Callable[[Scenario], bool]) -> Callable[[Scenario], bool]:
    """Return a condition for scenarios: all given conditions hold."""
    return lambda scenario: all(condition(scenario) for condition in conditions)


def wraps_the_model(scenario: Scenario) -> bool:
    """Whether data parallelism wraps the whole model, as mutants need that disable its reduction.

    A pipeline schedule calls wrapped stages instead, and decides when they reduce.
    """
    return not scenario.layout.has(Pipeline)


def is_eager(scenario: Scenario) -> bool:
    """Whether nothing is compiled or traced, so that hooks of a mutant run in each step.

    A compiled module keeps the hooks that existed when it was traced. A step traced to one graph does not see changes to
    gradients before the update.
    """
    return not any(layout.execution.is_compiled or layout.execution.whole_step for layout in scenario.layouts)


def has_ranks(scenario: Scenario) -> bool:
    """Whether there are several ranks."""
    return scenario.layout.mesh.num_ranks > 1


def has_data_ranks(scenario: Scenario) -> bool:
    """Whether nothing is compiled or traced, and several ranks have different rows."""
    return is_eager(scenario) and scenario.layout.num_data_ranks > 1


def has_chunks(scenario: Scenario) -> bool:
    """Whether a pipeline splits each microbatch into several chunks."""
    return scenario.layout.num_chunks > 1


def has_microbatches(scenario: Scenario) -> bool:
    """Whether nothing is compiled or traced, and gradients are accumulated over several microbatches."""
    return is_eager(scenario) and len(scenario.training.data.microbatches) > 1


def has_trailing_window(scenario: Scenario) -> bool:
    """Whether nothing is compiled or traced, and the last step has fewer microbatches than earlier steps."""
    return is_eager(scenario) and scenario.training.has_trailing_window


def has_steps(scenario: Scenario) -> bool:
    """Whether nothing is compiled or traced, and several steps run (after a checkpoint, if there is one)."""
    return is_eager(scenario) and has_next_step(scenario)


def has_next_step(scenario: Scenario) -> bool:
    """Whether several steps run, not counting steps before a checkpoint."""
    before = 0 if scenario.resume is None else scenario.resume.steps
    return scenario.training.steps - before > 1


def has_optimizer_state(scenario: Scenario) -> bool:
    """Whether the optimizer has state."""
    optimizer = scenario.training.optimizer
    return not (isinstance(optimizer, SGD) and optimizer.momentum == 0.0)


def is_wrapped(layout: Layout) -> bool:
    """Whether the layout uses `DistributedDataParallel`."""
    return layout.has(DDP) or any(parallelism.implementation is Replicator.DDP for parallelism in layout.of(Replicate))


def reduces_by_hooks(scenario: Scenario) -> bool:
    """Whether several ranks reduce gradients through `DistributedDataParallel` without a communication hook."""
    compressed = any(
        isinstance(parallelism, DDP | Replicate) and parallelism.compression is not Compression.NONE
        for layout in scenario.layouts
        for parallelism in layout.parallelisms
    )
    return has_data_ranks(scenario) and is_wrapped(scenario.layout) and not compressed


def reduces_all_by_hooks(scenario: Scenario) -> bool:
    """Whether hooks of `DistributedDataParallel` reduce all gradients over several ranks.

    Zero-bubble schedules run them for the first stage only (`ddp_stage_of_split_backward`).
    """
    return reduces_by_hooks(scenario) and not any(layout.has(Pipeline) and splits_backward(layout) for layout in scenario.layouts)


def updates_exceed_rounding(scenario: Scenario) -> bool:
    """Whether updates of parameters exceed rounding errors.

    In float32, the learning rates 5e-5 and 1e-4 can give equal parameters.
    """
    return scenario.training.precision is Precision.FLOAT64 or scenario.training.optimizer.lr >= LEAST_VISIBLE_RATE
