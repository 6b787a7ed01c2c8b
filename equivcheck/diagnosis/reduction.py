"""Gradients that are reduced over ranks in a wrong way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import torch

from equivcheck.diagnosis.case import Case
from equivcheck.diagnosis.counterfactual import Counterfactual, alone, side_by_side
from equivcheck.diagnosis.side_by_side import Reduction, SideBySide, WhenReduced, data_axes
from equivcheck.diagnosis.suspects import suspects
from equivcheck.diagnosis.words import gradients, listed, over
from equivcheck.train.setup import Setup
from equivcheck.verdict.cause import Cause


def wrong_reductions(case: Case) -> Iterator[Counterfactual]:
    """Missing, partial, summed, averaged twice: of the tensors that differ first, or of all."""
    for names in suspects(case):
        yield lost(case, names)
        yield from _over_part(case, names)
        yield from _scaled(case, names)
    yield from _not_of_all_microbatches(case)


def lost(case: Case, names: Sequence[str]) -> Counterfactual:
    """Gradients that are zero."""
    return alone(case, Cause.GRADIENT_LOST, f"{gradients(case, names)} zero", lambda setup: scale(setup, names, 0.0))


def _over_part(case: Case, names: Sequence[str]) -> Iterator[Counterfactual]:
    mesh, axes = case.scenario.layout.mesh, _wide_axes(case)
    if not axes or case.rounding is not None or case.scenario.start is not None:
        return
    for count in range(len(axes)):
        for kept in combinations(axes, count):
            lacking = tuple(name for name in axes if name not in kept)
            if kept:
                sentence = f"reduced over {over(mesh, kept)}, but not over {over(mesh, lacking)}"
            else:
                sentence = f"not reduced over {over(mesh, lacking)}: each has what its own rows give"
            cause = Cause.REDUCED_OVER_PART if kept else Cause.NOT_REDUCED
            yield _reduced(case, cause, names, sentence, Reduction(axes=kept))
            divided = f"{sentence}, divided by their number all the same"
            yield _reduced(case, cause, names, divided, Reduction(axes=kept, factor=1 / mesh.size(*lacking)))


def _not_of_all_microbatches(case: Case) -> Iterator[Counterfactual]:
    """Gradients of some microbatches stay those of each rank's own rows."""
    mesh, axes, count = case.scenario.layout.mesh, _wide_axes(case), len(case.scenario.training.data.microbatches)
    if not axes or count == 1 or case.rounding is not None or case.scenario.start is not None:
        return
    for numbers in dict.fromkeys((tuple(range(1, count)), tuple(range(count - 1)), (count - 1,), (0,))):
        which = "microbatch" if len(numbers) == 1 else "microbatches"
        words = (
            f"what {which} {listed([str(number) for number in numbers])} adds to gradients is not reduced over {over(mesh, axes)}"
        )

        def change(trainings: SideBySide, numbers: tuple[int, ...] = numbers) -> None:
            trainings.local_microbatches, trainings.meeting = frozenset(numbers), WhenReduced.EACH

        yield side_by_side(case, Cause.NOT_REDUCED, words, change)


def _scaled(case: Case, names: Sequence[str]) -> Iterator[Counterfactual]:
    """Sums that are not divided, or divided once more: over axes along which rows differ, then over others."""
    mesh, axes = case.scenario.layout.mesh, _wide_axes(case)
    several = len(case.scenario.training.data.microbatches) > 1
    for chosen in _subsets(axes):
        size, where = mesh.size(*chosen), over(mesh, chosen)
        for cause, factor, words in (
            (Cause.SUMMED, size, f"the sum over {where}, not the mean"),
            (Cause.AVERAGED_TWICE, 1 / size, f"divided by the number of {where} twice"),
        ):
            yield alone(case, cause, f"{gradients(case, names)} {words}", _scaling(names, factor))
            if several and case.rounding is None and case.scenario.start is None:
                yield _reduced(case, cause, names, f"{words}, at each microbatch", Reduction(axes=axes, factor=factor))


def wrong_factors(case: Case) -> Iterator[Counterfactual]:
    """Gradients multiplied or divided by the size of axes along which rows do not differ."""
    mesh, axes = case.scenario.layout.mesh, _wide_axes(case)
    for names in suspects(case):
        for chosen in _subsets(tuple(name for name in mesh.names if mesh.size(name) > 1)):
            if not set(chosen) <= set(axes):
                size, where = mesh.size(*chosen), over(mesh, chosen)
                words = f"{gradients(case, names)} multiplied by the number of {where}, as if it were summed over them"
                yield alone(case, Cause.SUMMED, words, _scaling(names, size))
                words = f"{gradients(case, names)} divided by the number of {where}"
                yield alone(case, Cause.AVERAGED_TWICE, words, _scaling(names, 1 / size))


def _subsets(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every choice of at least one axis, the largest first."""
    return (chosen for count in range(len(axes), 0, -1) for chosen in combinations(axes, count))


def _wide_axes(case: Case) -> tuple[str, ...]:
    mesh = case.scenario.layout.mesh
    return tuple(name for name in data_axes(case.scenario.layout) if mesh.size(name) > 1)


def _reduced(case: Case, cause: Cause, names: Sequence[str], words: str, reduction: Reduction) -> Counterfactual:
    def change(trainings: SideBySide) -> None:
        trainings.reductions.update(dict.fromkeys(names, reduction))

    return side_by_side(case, cause, f"{gradients(case, names)} {words}", change)


def _scaling(names: Sequence[str], factor: float) -> Callable[[Setup], None]:
    return lambda setup: scale(setup, names, factor)


def scale(setup: Setup, names: Sequence[str], factor: float) -> None:
    """Multiply some gradients before they are read."""
    parameters = dict(setup.model.named_parameters())

    def multiply(_optimizer: torch.optim.Optimizer, _step: int) -> None:
        for name in names:
            gradient = parameters[name].grad
            if gradient is not None:
                gradient.mul_(factor)

    setup.before_update.append(multiply)
