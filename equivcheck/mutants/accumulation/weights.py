"""Microbatches whose gradients count for more or less than they should."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from equivcheck.mutants.mutant import Minimum, fault
from equivcheck.mutants.needs import DATA_PARALLEL, has_data_ranks, has_microbatches
from equivcheck.mutants.rank import data_rank, data_ranks, num_microbatches
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Scenario
from equivcheck.training.accumulate import part_loss, scalar
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup
from equivcheck.worlds.trace.stage import Stage

ACCUMULATES = ("ddp", "replicate", "fsdp1", "fsdp2", "spmd", "fsdp2 x tensor_parallel")
"""Layouts in which a rank accumulates over microbatches by itself: not a pipeline, whose schedule does."""
TWO_MICROBATCHES = "it takes two microbatches, and neither a second rank nor a second step"


def _averages(scenario: Scenario) -> bool:
    return has_microbatches(scenario) and scenario.training.loss.is_mean


def _is_uneven(scenario: Scenario) -> bool:
    return _averages(scenario) and len(set(scenario.training.data.microbatches)) > 1


def has_microbatches_of_ranks(scenario: Scenario) -> bool:
    """Whether several microbatches are accumulated on each of several ranks."""
    return has_microbatches(scenario) and has_data_ranks(scenario)


def _weigh(setup: Setup, weight: Callable[[int], float]) -> None:
    """Let gradients of microbatches count otherwise, while the loss stays right; `weight` is told the number of each."""
    setup.compute = partial(_accumulate, weight)


def _accumulate(weight: Callable[[int], float], setup: Setup, microbatches: Sequence[Batch], index: int) -> float:
    """As `accumulate` does, but for the weights."""
    total = 0.0
    for number, batch in enumerate(microbatches):
        setup.announce(Stage.COMPUTE, index)
        with setup.accumulation(number == len(microbatches) - 1):
            loss = part_loss(setup, setup.take(batch), index, batch.rows)
            (loss * weight(number)).backward()  # type: ignore[no-untyped-call]
        setup.announce(Stage.READING, index)
        total += scalar(loss)
    return total


@fault(
    layouts=ACCUMULATES,
    applies=_averages,
    causes=(Cause.MICROBATCHES_SUMMED, Cause.SCALED),
    minimum=Minimum(ranks=1, because=TWO_MICROBATCHES),
)
def microbatches_summed(setup: Setup) -> None:
    """The means of microbatches are summed and not divided by their number."""
    data = setup.training.data
    _weigh(setup, lambda number: data.batch / data.microbatches[number])


@fault(
    layouts=ACCUMULATES,
    applies=has_microbatches,
    causes=(Cause.SCALED, Cause.AVERAGED_TWICE),
    minimum=Minimum(ranks=1, because=TWO_MICROBATCHES),
)
def microbatches_averaged_twice(setup: Setup) -> None:
    """Gradients are divided by the number of microbatches once more."""
    count = num_microbatches(setup)
    _weigh(setup, lambda _number: 1.0 / count)


@fault(
    layouts=ACCUMULATES,
    applies=has_microbatches,
    causes=(Cause.RESCALED_EACH_MICROBATCH,),
    minimum=Minimum(ranks=1, because=TWO_MICROBATCHES),
)
def rescaled_each_microbatch(setup: Setup) -> None:
    """What has been accumulated is divided by the number of microbatches again at each one."""
    count = num_microbatches(setup)
    _weigh(setup, lambda number: float(count) ** (number + 1 - count))


@fault(
    layouts=ACCUMULATES,
    applies=has_microbatches,
    causes=(Cause.MICROBATCH_LOST,),
    minimum=Minimum(ranks=1, because=TWO_MICROBATCHES),
)
def only_last_microbatch(setup: Setup) -> None:
    """Gradients are zeroed before each microbatch, so that only the last one's are kept."""
    last = num_microbatches(setup) - 1
    _weigh(setup, lambda number: float(number == last))


@fault(
    layouts=ACCUMULATES,
    applies=has_microbatches,
    causes=(Cause.MICROBATCH_LOST,),
    minimum=Minimum(ranks=1, because=TWO_MICROBATCHES),
)
def only_first_microbatch(setup: Setup) -> None:
    """Gradients of the first microbatch are kept, and those of the others are not added."""
    _weigh(setup, lambda number: float(number == 0))


@fault(
    layouts=ACCUMULATES,
    applies=has_microbatches,
    causes=(Cause.MICROBATCH_LOST,),
    minimum=Minimum(ranks=1, because=TWO_MICROBATCHES),
)
def last_microbatch_lost(setup: Setup) -> None:
    """The last microbatch counts in the loss, but its gradients are not added."""
    last = num_microbatches(setup) - 1
    _weigh(setup, lambda number: float(number != last))


@fault(
    layouts=DATA_PARALLEL,
    applies=has_microbatches_of_ranks,
    causes=(Cause.ROWS_LOST, Cause.MICROBATCH_LOST),
    minimum=Minimum(because="one rank that does it right and one that does not, and two microbatches"),
)
def last_microbatch_lost_on_one_rank(setup: Setup) -> None:
    """The last rank leaves out the gradients of its last microbatch."""
    if data_rank(setup) == data_ranks(setup) - 1:
        last_microbatch_lost(setup)


@fault(
    layouts=ACCUMULATES,
    applies=_is_uneven,
    causes=(Cause.MEAN_OF_MEANS,),
    minimum=Minimum(ranks=1, because="it takes two microbatches of different sizes, and neither a second rank nor a second step"),
)
def mean_of_means(setup: Setup) -> None:
    """Means of microbatches are averaged as if these were equally large, rather than over the rows of the batch."""
    data, count = setup.training.data, num_microbatches(setup)
    _weigh(setup, lambda number: data.batch / data.microbatches[number] / count)
