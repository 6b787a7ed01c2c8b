"""Emulates ranks on one device: their trainings run in turns, and plain arithmetic replaces communication."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from equivcheck.diagnosis.emulation.held_elements import held_elements
from equivcheck.diagnosis.emulation.turns import Turns
from equivcheck.diagnosis.evidence import Evidence, peers_of
from equivcheck.layouts.base.rounding import EACH
from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.worlds.trace.trace import Trace

Optimizer = torch.optim.Optimizer
Event = Callable[[int, int], None]
"""Function called with a rank and a step."""
Reduce = Callable[[list[Gradients], int, int], list[Gradients]]
"""Function to get each rank's gradients, from the gradients on all ranks, the microbatch and the step."""
Norm = Callable[[int, Gradients, float], torch.Tensor]
"""Function to get the norm for clipping, from a rank, its gradients and the norm type."""
Scale = Callable[[list[torch.Tensor], torch.Tensor], None]
"""Function to scale the gradients of some tensors by a norm, as the training clips."""


class EmulatedRanks(ABC):
    """Ranks emulated in one process. They compute the same as one device, unless a `Mistake` changes them.

    A mistake changes attributes before `train`. Every rank has full parameters. If `own_rows` was set, each rank computes on its
    own rows, and gradients are averaged. Otherwise, each rank computes on all rows. Subclasses with `one` train only rank 0, and
    its trace stands for all ranks.
    """

    def __init__(
        self, diverged: Evidence, models: list[nn.Module], parameters: list[dict[str, torch.Tensor]], *, own_rows: bool
    ) -> None:
        """`models` has one model for each rank, or for rank 0 only. `parameters` has the parameters of these models by name."""
        self.held, self.coordinates = held_elements(diverged), diverged.coordinates
        self.axes = diverged.data_axes if own_rows else ()
        """Mesh axes along which gradients are averaged."""
        self.models, self.parameters = models, parameters
        self.optimizers: dict[int, Optimizer] = {}
        self.turns = Turns(len(models))

        self.reduce: Reduce = self.mean
        """Function called after each backward pass, with the gradients that this pass added."""
        self.when = EACH
        """When gradients are reduced if there are several microbatches."""
        self.gathers_gradients = True
        """Whether ranks exchange gradient elements, so that each has all of them."""
        self.norm: Norm = lambda _rank, gradients, kind: norm_of(gradients.values(), kind)
        """Function for the norm, called at each clipping."""
        self.returns_total = False
        """Whether clipping returns the norm over all gradients, whatever norm it clips by."""
        self.clips_each = False
        """Whether each tensor is clipped by its own norm."""
        self.built: list[Callable[[int, Optimizer], None]] = []
        """Function called with each new optimizer."""
        self.schedules: list[Callable[[Any], None]] = []
        """Function called with each new learning-rate schedule."""
        self.before_step: list[Event] = []
        self.between_microbatches: list[Event] = []
        """Functions called after each backward pass in a step, except the last. They update, with gradients that no trace has."""
        self.after_backward: list[Event] = []
        """Function called after the last backward pass in a step, before clipping."""
        self.after_clipping: list[Event] = []
        self.before_reading: list[Event] = []
        """Function called after clipping, before gradients are read."""
        self.before_update: list[Event] = []
        """Function called after gradients are read, before the update."""
        self.after_update: list[Event] = []
        self.at_end: dict[int, Callable[[], None]] = {}
        """Functions called at the end of a rank's step; keys are ranks."""
        self.loss_weights: Sequence[float] = ()
        """Factor for each microbatch's loss; empty for 1."""
        self.returns: Callable[[int, Any], Any] = lambda _rank, value: value
        """Function that replaces the loss that a rank reports."""
        self.num_backward = diverged.num_microbatches
        """Backward passes per step."""
        self._step = [0] * len(models)

    @abstractmethod
    def train(self, num_steps: int) -> tuple[Trace, ...]:
        """Train `num_steps` steps, and return a trace for each emulated model."""

    def peers(self, rank: int, axes: Sequence[str]) -> list[int]:
        """Return the ranks that differ from `rank` only along these axes. `rank` itself is among them."""
        return peers_of(self.coordinates, rank, axes)

    def mean(self, gradients: list[Gradients], _microbatch: int, _step: int) -> list[Gradients]:
        """Return the gradients, averaged over ranks with different rows: one result for each rank.

        Ranks share the results, so the caller must not change them.
        """
        peers = [tuple(self.peers(rank, self.axes)) for rank in range(len(self.models))]
        means = {group: self.mean_over(gradients, group) for group in dict.fromkeys(peers)}
        return [means[group] for group in peers]

    @staticmethod
    def mean_over(gradients: Sequence[Gradients], ranks: Sequence[int]) -> Gradients:
        """Average the gradients of these ranks. A missing gradient counts as zeros."""
        if len(ranks) == 1:
            return gradients[ranks[0]]
        means: dict[str, torch.Tensor] = {}
        for rank in ranks:
            for name, value in gradients[rank].items():
                means[name] = means[name].add_(value) if name in means else value.clone()
        return {name: value.div_(len(ranks)) for name, value in means.items()}

    def multiply_gradients(self, factor: Callable[[str, int, int], float]) -> None:
        """Change the reduction: averaged gradients are multiplied by ``factor(name, microbatch, step)``.

        `name` is the parameter's name.
        """
        self.reduce = lambda all_, microbatch, step: [
            {name: value * factor(name, microbatch, step) for name, value in each.items()}
            for each in self.mean(all_, microbatch, step)
        ]

    def gradients(self, rank: int) -> Gradients:
        """Return a rank's current gradients by parameter name."""
        return {name: value.grad for name, value in self.parameters[rank].items() if value.grad is not None}

    def each_optimizer(self, rank: int) -> Sequence[Optimizer]:
        """Return all optimizers of a rank."""
        return [self.optimizers[rank]]

    def groups(self, rank: int) -> list[dict[str, Any]]:
        """Return the parameter groups in a rank's optimizers."""
        return [group for each in self.each_optimizer(rank) for group in each.param_groups]

    def exchange(self, rank: int, given: Any, together: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Pass the value `given` to the other ranks, wait for theirs, and return this rank's result.

        `together` gets all ranks' values, and returns a result for each rank.
        """
        return self.turns.meet(rank, given, together)

    def with_gradient(
        self, rank: int, values: torch.Tensor, axes: Sequence[str], together: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> torch.Tensor:
        """Return a rank's tensor. `together` computes its gradient from those on all ranks along `axes`."""

        def exchange(gradient: torch.Tensor) -> Any:
            groups = [self.peers(each.rank, axes) for each in self.coordinates]
            return self.exchange(rank, gradient, lambda all_: [together([all_[peer] for peer in peers]) for peers in groups])

        copied = values.view_as(values)
        if copied.requires_grad:
            copied.register_hook(exchange)  # type: ignore[no-untyped-call]
        return copied

    def clip_rank(self, rank: int, tensors: list[torch.Tensor], kind: float, scale: Scale) -> torch.Tensor:
        """Clip a rank's gradients by the norm that `self.norm` computes, and return the norm.

        `kind` is the norm type. ``scale(tensors, norm)`` scales the gradients of `tensors` down if this norm exceeds the maximum.
        """
        own = [(tensor, tensor.grad) for tensor in tensors if tensor.grad is not None]
        names = {id(value): name for name, value in self.parameters[rank].items()}
        gradients = {names[id(tensor)]: gradient for tensor, gradient in own if id(tensor) in names}
        with torch.no_grad():
            norm, total = self.norm(rank, gradients, kind), norm_of(gradients.values(), kind)
            if self.clips_each:
                for tensor, gradient in own:
                    scale([tensor], norm_of([gradient], kind))
            else:
                scale(tensors, norm)
        self._call_events(self.after_clipping, rank)
        return total if self.returns_total else norm

    def _call_events(self, events: Sequence[Event], rank: int) -> None:
        with torch.no_grad():
            for event in events:
                event(rank, self._step[rank])

    def _reduced(self, rank: int, before: Gradients, fresh: Gradients, microbatch: int, *, last: bool) -> Gradients:
        """Return a rank's gradients after a backward pass, from the gradients before the pass and the added gradients."""
        waiting = _added(before, fresh) if self.when.whole else fresh
        if self.when.once and not last:
            return _added(before, fresh)
        step = self._step[rank]
        reduced = self.exchange(rank, waiting, lambda all_: self.reduce(all_, microbatch, step))
        return _added({} if self.when.whole else before, reduced)

    def _end_backward(self, rank: int) -> None:
        """Give each rank its missing gradient elements, from ranks that hold them."""
        if self.gathers_gradients and self.held.is_sharded and len(self.models) > 1:
            self.exchange(rank, self.gradients(rank), self._gather)
        self._call_events(self.after_backward, rank)

    def _end_step(self, rank: int) -> None:
        """Give each rank its missing parameter elements, from ranks that hold them."""
        if len(self.models) > 1:
            self.exchange(rank, {name: value.data for name, value in self.parameters[rank].items()}, self._gather_updated)
        self._step[rank] += 1

    def _gather(self, values: list[Gradients]) -> Sequence[None]:
        self.held.gather(values)
        return [None] * len(values)

    def _gather_updated(self, values: list[Gradients]) -> Sequence[None]:
        self.held.take_from_owners(values)
        return self._gather(values)


def _added(old: Gradients, new: Gradients) -> Gradients:
    return old | {name: old[name] + value if name in old else value.clone() for name, value in new.items()}


def total_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Add up tensors with equal shapes."""
    return torch.stack(tensors).sum(0)


def norm_of(tensors: Iterable[torch.Tensor], kind: float) -> torch.Tensor:
    """Return the norm over all elements in `tensors`, with the norm type `kind`; 0 without tensors.

    The result is the norm of the tensors' norms, as in `torch.nn.utils.get_total_norm`, because a norm over millions of elements
    at once is rounded in another way.
    """
    norms = [torch.linalg.vector_norm(tensor, kind) for tensor in tensors if tensor.numel()]
    return torch.linalg.vector_norm(torch.stack(norms), kind) if norms else torch.zeros((), dtype=torch.float64)
