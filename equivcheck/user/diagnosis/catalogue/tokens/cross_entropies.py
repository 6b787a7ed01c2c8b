"""Mistakes in cross-entropies whose classes are split over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.training.labels import IGNORED
from equivcheck.user.diagnosis.catalogue.function_modes import enter_in_step
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """A cross-entropy's parts, for each label. The loss is `total - (1 - smoothing) * picked - smoothing * mean`."""

    logits: torch.Tensor
    """Logits, with the classes in the last dim."""
    picked: torch.Tensor
    """The label's logit."""
    owner: torch.Tensor
    """The rank with the label's class, as an index."""
    smoothing: float
    """Fraction for the mean over all classes."""
    count: int
    """Number of ranks that share the classes."""

    @property
    def total(self) -> torch.Tensor:
        """Log-sum-exp over all logits."""
        return self.logits.logsumexp(-1)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """Each rank's logits."""
        return self.logits.chunk(self.count, -1)


Way = Callable[[_Terms, int], torch.Tensor]
"""Function to get the wrong addition to each label's loss, from the terms and the rank's index on the axis."""


def wrong_cross_entropies(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes in a cross-entropy whose classes are sharded over ranks. Yields nothing without such a cross-entropy."""
    if not diverged.same_row_axes or not _is_computed(diverged):
        return
    for axis in diverged.same_row_axes:
        for cause, words, way, is_quick in _ways(diverged, axis):
            yield Mistake(cause, words, partial(_change_losses, axis=axis, way=way), is_quick=is_quick)


def _ways(diverged: DivergedTraining, axis: str) -> Iterator[tuple[Cause, str, Way, bool]]:
    where, kind, size = diverged.ranks_text((axis,)), diverged.ranks_kind((axis,)), diverged.size((axis,))
    part = Cause.SOFTMAX_OF_PART
    words = f"each of {where} divides by the sum over the exponentials of its own logits, not of all"
    yield part, words, _divided_by_own, False
    yield part, f"each of {where} smooths labels over its own classes only", _smoothed_over_own, False
    words = f"the softmax counts each class once on each of {where}, so the loss is log({size}) larger"
    for share, more in ((1 / size, f", and the gradient of the log-sum-exp is divided by {size}"), (1.0, "")):
        yield part, words + more, partial(_counted_often, share=share), True
    words = f"each of {where} subtracts the maximum of its own logits, not of all, before exponentials are summed"
    yield part, words, _less_own_maximum, True
    words = "in the cross-entropy, only the log-sum-exp has a gradient: the term with the labels' logits has none"
    yield Cause.GRADIENT_LOST, words, lambda terms, _: _gradient_of(-_label_term(terms)), True
    words = f"the logits of labels are not summed over {where}: each rank subtracts only those of its own classes"
    yield Cause.NOT_REDUCED, words, lambda terms, rank: ((terms.owner != rank) * -_label_term(terms)).detach(), False
    times = f"multiplied by {size}, the number of {kind}"
    words = f"in the cross-entropy, the gradient of the log-sum-exp is {times}"
    yield Cause.SUMMED, words, lambda terms, _: _gradient_of((terms.count - 1) * terms.total), True
    words = f"in the cross-entropy, the gradient of the logits of labels is {times}"
    yield Cause.SUMMED, words, lambda terms, _: _gradient_of((terms.count - 1) * _label_term(terms)), True


def _label_term(terms: _Terms) -> torch.Tensor:
    return -(1 - terms.smoothing) * terms.picked


def _gradient_of(values: torch.Tensor) -> torch.Tensor:
    """Return zeros that pass a gradient to `values`."""
    return values - values.detach()


def _divided_by_own(terms: _Terms, rank: int) -> torch.Tensor:
    """Each rank reports its own loss, and computes the gradient of its own logits from this loss."""
    own = [part.logsumexp(-1) for part in terms.parts]
    return _gradient_of(torch.stack(own).sum(0) - terms.total) + (own[rank] - terms.total).detach()


def _smoothed_over_own(terms: _Terms, rank: int) -> torch.Tensor:
    own = [part.mean(-1) for part in terms.parts]
    right = terms.logits.mean(-1)
    return terms.smoothing * (_gradient_of(right - torch.stack(own).sum(0)) + (right - own[rank]).detach())


def _counted_often(terms: _Terms, _rank: int, *, share: float) -> torch.Tensor:
    """Multiply the log-sum-exp's gradient by `share`, and add log(count) to the loss."""
    return _gradient_of((share - 1) * terms.total) + math.log(terms.count)


def _less_own_maximum(terms: _Terms, _rank: int) -> torch.Tensor:
    own = torch.stack([part.detach().amax(-1) for part in terms.parts], -1)
    maxima = torch.cat([own[..., number, None].expand_as(part) for number, part in enumerate(terms.parts)], -1)
    of_label = own.gather(-1, terms.owner[..., None])[..., 0]
    shift = (1 - terms.smoothing) * of_label + terms.smoothing * maxima.mean(-1)
    return (terms.logits - maxima).logsumexp(-1) - terms.total + shift


def _is_computed(diverged: DivergedTraining) -> bool:
    """Whether a step on one device computes a cross-entropy with class numbers."""
    ranks, seen = EmulatedUserRanks(diverged, own_rows=False, one=True), list[int]()

    def see(terms: _Terms, _rank: int) -> torch.Tensor:
        seen.append(1)
        return torch.zeros_like(terms.picked)

    enter_in_step(ranks, lambda _model: _CrossEntropies(see, 0, 1))
    try:
        ranks.train(1)
    except Exception:  # torch or the user's code rejects the mode
        return False
    return bool(seen)


def _change_losses(ranks: EmulatedUserRanks, *, axis: str, way: Way) -> None:
    count = ranks.diverged.size((axis,))

    def mode_for(model: nn.Module) -> TorchFunctionMode:
        rank = next(rank for rank, each in enumerate(ranks.models) if each is model)
        return _CrossEntropies(way, ranks.coordinates[rank].indices[axis], count)

    enter_in_step(ranks, mode_for)


class _CrossEntropies(TorchFunctionMode):
    """Function mode that adds something to each label's loss in `cross_entropy`. Class weights are not supported."""

    def __init__(self, way: Way, rank: int, count: int) -> None:
        super().__init__()
        self._way, self._rank, self._count = way, rank, count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and change its result if it is a cross-entropy with class numbers."""
        result, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        if func is not functional.cross_entropy or len(args) > 2 or kwargs.get("weight") is not None:
            return result
        names = dict(zip(("input", "target"), args, strict=False)) | kwargs
        logits, labels = names["input"], names["target"]
        if labels.is_floating_point() or logits.dim() != labels.dim() + 1:
            return result
        return self._changed(result, logits.movedim(1, -1) if labels.dim() else logits, labels, kwargs)

    def _changed(self, result: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        is_counted = labels != options.get("ignore_index", IGNORED)
        classes = labels.where(is_counted, 0)
        size = -(-logits.shape[-1] // self._count)
        terms = _Terms(
            logits=logits,
            picked=logits.gather(-1, classes[..., None])[..., 0],
            owner=classes // size,
            smoothing=options.get("label_smoothing", 0.0),
            count=self._count,
        )
        more: torch.Tensor = self._way(terms, self._rank) * is_counted
        reduction = options.get("reduction", "mean")
        if reduction != "none":
            more = more.sum() / (is_counted.sum() if reduction == "mean" else 1)
        return result + more
