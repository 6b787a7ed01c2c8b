"""Mistakes with sequences: positions start at 0 again, losses are means over parts, labels are lost or shifted."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.diagnosis.words import join_words
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.training.labels import IGNORED
from equivcheck.user.diagnosis.catalogue.function_modes import enter_in_forward
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.frames import deepest_line
from equivcheck.user.task import Loss

MAX_LINES = 4
"""Try at most so many lines that call `arange`, or slice parameters or buffers."""


def restarted_positions(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield a possible mistake: positions start at 0 again on each rank.

    Each line of code that counts positions is tried separately, then all such lines together.
    """
    for axis in diverged.same_row_axes:
        count, where = diverged.size((axis,)), diverged.ranks_text((axis,))
        places = _places(diverged, count)
        lines = list(dict.fromkeys(places))[:MAX_LINES]
        for chosen in [*([line] for line in lines), *([lines] if len(lines) > 1 else [])]:
            words = f"positions start at 0 again on each of {where}, in {join_words(chosen)}"
            numbers = [number for number, line in enumerate(places) if line in chosen]
            yield Mistake(Cause.POSITIONS, words, partial(_restart, numbers=numbers, count=count), is_quick=True)


def losses_of_parts(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield two possible mistakes: each rank divides its loss by its own number of labels, or ignores its last label."""
    for axis in diverged.same_row_axes:
        count, where = diverged.size((axis,)), diverged.ranks_text((axis,))
        words = f"each of {where} divides its loss by its own number of labels, and the results are averaged"
        yield Mistake(Cause.MEAN_OF_MEANS, words, partial(_split_losses, count=count, loses=False), is_quick=True)
        lost = f"the last label of each of {where} is lost, except that of the last rank"
        for of_parts, more in ((1, ""), (count, ", and each divides its loss by its own number of labels")):
            change = partial(_split_losses, count=of_parts, loses=True, boundaries=count)
            yield Mistake(Cause.ANOTHER_LABEL, lost + more, change, is_quick=True)


def _split_losses(ranks: EmulatedUserRanks, *, count: int, loses: bool, boundaries: int = 1) -> None:
    """Split the sequence into `count` parts, and average their losses. `loses` ignores the last label in `boundaries` parts."""

    def mean_of_parts(_rank: int, loss: Loss) -> Loss:
        def mean(outputs: Any, targets: Any) -> Any:
            labels = _without_boundaries(targets, boundaries) if loses else targets
            pairs = zip(outputs.chunk(count, 1), labels.chunk(count, 1), strict=True)
            return sum(loss(*pair) for pair in pairs) / count

        return mean

    ranks.wraps_loss = mean_of_parts


def shifted_labels(_diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield a possible mistake: labels belong to the next or previous position, for example because they are shifted twice."""
    for by, words in ((-1, "the label of the next position"), (1, "the label of the previous position")):
        sentence = f"labels are shifted: each position is compared with {words}"
        yield Mistake(Cause.ANOTHER_LABEL, sentence, partial(_shift_labels, by=by), is_quick=True)


def _shift_labels(ranks: EmulatedUserRanks, *, by: int) -> None:
    def shift(targets: Any) -> torch.Tensor:
        labels = _class_numbers(targets).roll(by, 1)
        labels[:, 0 if by > 0 else -1] = IGNORED
        return labels

    ranks.wraps_loss = lambda _rank, loss: lambda outputs, targets: loss(outputs, shift(targets))


def _class_numbers(labels: torch.Tensor) -> torch.Tensor:
    """Copy the labels. Raises `TypeError` if the targets are not class numbers."""
    if labels.is_floating_point():
        raise TypeError("only class numbers can be ignored, but these targets are floating-point numbers")
    return labels.clone()


def _without_boundaries(labels: torch.Tensor, count: int) -> torch.Tensor:
    """Ignore the last label in each part, except the last part."""
    labels, size = _class_numbers(labels), labels.shape[1] // count
    labels[:, size - 1 : -1 : size] = IGNORED
    return labels


def _places(diverged: DivergedTraining, count: int) -> list[str]:
    """The user's line for each call that counts positions, in the first forward on one device."""
    ranks, found = EmulatedUserRanks(diverged, own_rows=False, one=True), list[list[str]]()

    def enter(model: nn.Module) -> TorchFunctionMode:
        mode = _Positions(model, count)
        found.append(mode.places)
        return mode

    enter_in_forward(ranks, enter)
    try:
        ranks.train(1)
    except Exception:  # torch or the user's code rejects the mode
        return []
    return found[0] if found else []


def _restart(ranks: EmulatedUserRanks, *, numbers: Collection[int], count: int) -> None:
    enter_in_forward(ranks, lambda model: _Positions(model, count, numbers))


class _Positions(TorchFunctionMode):
    """Finds position numbers, and tables that are read from the first position on. Restarts the places with given numbers."""

    def __init__(self, model: nn.Module, count: int, numbers: Collection[int] = ()) -> None:
        super().__init__()
        self.places: list[str] = []
        self._tables = {id(value) for value in (*model.parameters(), *model.buffers())}
        self._count, self._numbers = count, numbers

    def __torch_function__(self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call the function, and restart its result if it has positions."""
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        dim = None
        if name == "arange" and result.numel() and result[0] == 0:
            dim = 0
        elif name == "__getitem__" and id(args[0]) in self._tables:
            dim = _dim_read_from_start(args[1])
        if dim is None or result.dim() <= dim or result.shape[dim] % self._count or result.shape[dim] <= self._count:
            return result
        self.places.append(deepest_line(traceback.extract_stack()))
        if len(self.places) - 1 not in self._numbers:
            return result
        size = result.shape[dim]
        return result.index_select(dim, torch.tensor([place % (size // self._count) for place in range(size)]))


def _dim_read_from_start(index: Any) -> int | None:
    """Return the dim along which an index reads the first elements; None if there is none."""
    dim = 0
    for each in index if isinstance(index, tuple) else (index,):
        if isinstance(each, slice):
            if not each.start and each.stop is not None and each.step is None:
                return dim
        elif each is not None and not isinstance(each, int):
            return None
        dim += not isinstance(each, int)
    return None
