"""Mistakes in optimizer updates: skipped steps, lost or foreign state, wrong step counts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from types import MethodType

import torch

from equivcheck.diagnosis.words import numbered, rows_of_tensor, tensors
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.counterfactual import Change, Counterfactual, Honest, Span, spans
from equivcheck.user.diagnosis.diverged import DivergedTraining, Masks, held_elements, wrong_elements
from equivcheck.user.diagnosis.emulated_ranks import EmulatedRanks, Optimizer
from equivcheck.worlds.trace.differences import Phase

Who = tuple[Collection[int], str]
"""Ranks, and words for them. Empty words stand for all ranks."""


def wrong_updates(diverged: DivergedTraining, _honest: Honest) -> Iterator[Counterfactual]:
    """Yield skipped, repeated and late updates, lost or foreign state, and wrong step counts."""
    for span in spans(diverged):
        yield from _skipped(diverged, span)
        yield from _lost(diverged, span)
    yield from _counts()
    yield from _repeated(diverged)
    yield from _of_another(diverged)
    words = "the optimizer updates at the end of the step, after code that should run after the update"
    yield Counterfactual(cause=Cause.STALE, sentence=words, change=_late)


def _who(diverged: DivergedTraining) -> Iterator[Who]:
    everyone = range(diverged.task.num_ranks)
    yield everyone, ""
    if len(everyone) > 1:
        for rank in everyone:
            yield [rank], numbered([rank])
    for rank in everyone if len(everyone) > 2 else ():
        yield [other for other in everyone if other != rank], f"every rank but {rank}"


def _elements(diverged: DivergedTraining) -> Iterator[tuple[Masks | None, str]]:
    """All elements, and the first that differ after an update."""
    yield None, ""
    if diverged.first.phase is Phase.UPDATE:
        masks = {name: mask for name, mask in wrong_elements(diverged, Phase.UPDATE).items() if name in diverged.updated}
        whole = all(mask.all() for mask in masks.values())
        if masks and not (whole and set(masks) >= set(diverged.updated)):
            words = rows_of_tensor({name: mask.numpy() for name, mask in masks.items()})
            yield masks, tensors(tuple(masks)) if whole else words


def _skipped(diverged: DivergedTraining, span: Span) -> Iterator[Counterfactual]:
    for ranks, who in _who(diverged):
        for masks, what in _elements(diverged) if not who else [(None, "")]:
            where = f" on {who}" if who else ""
            words = f"the optimizer does not update {what or 'any parameter'}{where}{span.words}"
            yield Counterfactual(cause=Cause.NOT_UPDATED, sentence=words, change=_without_update(ranks, masks, span))


def _without_update(on: Collection[int], masks: Masks | None, span: Span) -> Change:
    def change(ranks: EmulatedRanks) -> None:
        kept: dict[int, dict[str, torch.Tensor]] = {}

        def hide(rank: int, step: int) -> None:
            if rank in on and step in span and masks is None:
                kept[rank] = ranks.gradients(rank)
                for value in ranks.parameters[rank].values():
                    value.grad = None
            elif rank in on and step in span:
                kept[rank] = {name: value.detach().clone() for name, value in ranks.parameters[rank].items()}

        def show(rank: int, _step: int) -> None:
            for name, value in kept.pop(rank, {}).items():
                if masks is None:
                    ranks.parameters[rank][name].grad = value
                elif name in masks:
                    ranks.parameters[rank][name].data[masks[name]] = value[masks[name]]

        ranks.before_update.append(hide)
        ranks.after_update.append(show)

    return change


def _lost(diverged: DivergedTraining, span: Span) -> Iterator[Counterfactual]:
    """State is cleared, or its tensors are zeroed while the step count stays."""
    if len(diverged.task.batches) == 1 or not diverged.single.state.pieces:
        return
    for ranks, who in _who(diverged):
        where = f" of {who}" if who else ""
        yield Counterfactual(
            cause=Cause.STATE_LOST, sentence=f"the optimizer state{where} is lost{_before(span)}", change=_clearing(ranks, span)
        )
        for masks, what in _elements(diverged) if not who else [(None, "")]:
            words = f"the optimizer state{f' of {what}' if what else ''}{where} is zero{_before(span)}"
            yield Counterfactual(cause=Cause.STATE_LOST, sentence=words, change=_zeroing(ranks, masks, span))


def _before(span: Span) -> str:
    if span.last is not None:
        return f" before step {span.first}, once"
    return f" before step {span.first} and each that follows" if span.first > 1 else " before each step"


def _clearing(on: Collection[int], span: Span) -> Change:
    def change(ranks: EmulatedRanks) -> None:
        def clear(rank: int, step: int) -> None:
            if rank in on and step in span:
                ranks.optimizers[rank].state.clear()

        ranks.before_update.append(clear)

    return change


def _zeroing(on: Collection[int], masks: Masks | None, span: Span) -> Change:
    def change(ranks: EmulatedRanks) -> None:
        def zero(rank: int, step: int) -> None:
            if rank in on and step in span:
                for name, parameter, value in _tensors_of(ranks, rank):
                    if masks is None:
                        value.zero_()
                    elif name in masks and masks[name].shape == parameter.shape:
                        value[masks[name]] = 0

        ranks.before_update.append(zero)

    return change


def _tensors_of(ranks: EmulatedRanks, rank: int) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """State tensors in their parameter's shape."""
    state = ranks.optimizers[rank].state
    return [
        (name, parameter, value)
        for name, parameter in ranks.parameters[rank].items()
        for value in state.get(parameter, {}).values()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and parameter.dim()
    ]


def _counts() -> Iterator[Counterfactual]:
    for count in (1, 2, 3):
        words = f"the optimizer's step count begins at {count}, not 0: it has stepped before the first batch"
        yield Counterfactual(cause=Cause.STEP_COUNT, sentence=words, change=_begun(count))
    ways: tuple[tuple[str, Callable[[torch.Tensor], object], bool], ...] = (
        ("the optimizer counts every step as the first", lambda count: count.zero_(), True),
        ("the optimizer's step count does not advance", lambda count: count.sub_(1), False),
        ("the optimizer's step count advances twice per step", lambda count: count.add_(1), False),
    )
    for words, way, before in ways:
        yield Counterfactual(cause=Cause.STEP_COUNT, sentence=words, change=_counting(way, before=before))


def _begun(count: int) -> Change:
    """Step with zero gradients, learning rate and decay, so that only the step count changes."""

    def begin(optimizer: Optimizer) -> None:
        settings = [(group, group["lr"], group.get("weight_decay")) for group in optimizer.param_groups]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for group, _, decay in settings:
            group["lr"] = 0.0
            group.update({} if decay is None else {"weight_decay": 0.0})
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(count):
            optimizer.step()
        for group, rate, decay in settings:
            group["lr"] = rate
            group.update({} if decay is None else {"weight_decay": decay})
        for parameter in parameters:
            parameter.grad = None

    return lambda ranks: ranks.built.append(lambda _rank, optimizer: begin(optimizer))


def _counting(way: Callable[[torch.Tensor], object], *, before: bool) -> Change:
    def change(ranks: EmulatedRanks) -> None:
        def count(rank: int, _step: int) -> None:
            for state in ranks.optimizers[rank].state.values():
                if isinstance(state.get("step"), torch.Tensor):
                    way(state["step"])

        (ranks.before_update if before else ranks.after_update).append(count)

    return change


def _of_another(diverged: DivergedTraining) -> Iterator[Counterfactual]:
    """Optimizer state from another rank's shard, before one step or before each."""
    held = held_elements(diverged)
    if not held.is_sharded or len(diverged.task.batches) == 1:
        return
    first = max(1, diverged.first.step)
    sources = [(f"rank r has the optimizer state of rank r + {distance}", found) for distance, found in held.shifted()]
    sources += [(f"every rank has the optimizer state of rank {rank}", [rank] * held.num_ranks) for rank in range(held.num_ranks)]
    for span, more in ((Span(first=first, last=first), f" before step {first}"), (Span(first=first), f" from step {first} on")):
        for words, found in sources:

            def change(ranks: EmulatedRanks, found: list[int] = found, span: Span = span) -> None:
                def exchange(rank: int, step: int) -> None:
                    for name, _, value in _tensors_of(ranks, rank) if step in span else ():
                        held.exchange(name, value, found)

                ranks.before_update.append(exchange)

            yield Counterfactual(cause=Cause.STATE_OF_ANOTHER, sentence=words + more, change=change)


def _repeated(diverged: DivergedTraining) -> Iterator[Counterfactual]:
    for count in (count for count in dict.fromkeys((2, *diverged.counts)) if count > 1):
        words = f"the optimizer steps {count} times per step, each time with the same gradients"
        yield Counterfactual(cause=Cause.STEPPED_EACH_MICROBATCH, sentence=words, change=_stepping(count))


def _stepping(count: int) -> Change:
    def repeat(optimizer: Optimizer) -> None:
        own = optimizer.step

        def called(_optimizer: Optimizer) -> None:
            for _ in range(count):
                own()

        optimizer.step = MethodType(called, optimizer)  # type: ignore[method-assign]

    return lambda ranks: ranks.built.append(lambda _rank, optimizer: repeat(optimizer))


def _late(ranks: EmulatedRanks) -> None:
    """Defer the optimizer until the user's step has returned."""

    def defer(rank: int, optimizer: Optimizer) -> None:
        own = optimizer.step
        waiting: list[None] = []

        def end() -> None:
            while waiting:
                waiting.pop()
                own()

        optimizer.step = MethodType(lambda _optimizer: waiting.append(None), optimizer)  # type: ignore[method-assign]
        ranks.at_end[rank] = end

    ranks.built.append(defer)
