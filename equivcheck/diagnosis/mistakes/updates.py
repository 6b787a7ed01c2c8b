"""Mistakes in optimizer updates: skipped steps, lost or foreign state, wrong step counts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from types import MethodType

import torch

from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks, Optimizer
from equivcheck.diagnosis.evidence import Evidence
from equivcheck.diagnosis.mistake import Mistake, Span, StepFacts, spans
from equivcheck.diagnosis.mistakes.exchanged_states import exchanged_states
from equivcheck.diagnosis.mistakes.optimizer_state import act_in_span, state_of, state_tensors
from equivcheck.diagnosis.suspects import Masks, wrong_elements
from equivcheck.diagnosis.words import name_ranks, rows_of_tensor, tensors
from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.worlds.trace.differences import Phase

Who = tuple[Collection[int], str]
"""Ranks, and words for them. Empty words stand for all ranks."""


def wrong_updates(diverged: Evidence, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes in updates: skipped, repeated or late updates, lost state, another rank's state, or a wrong step count."""
    for span in spans(diverged):
        yield from _skipped(diverged, span)
        yield from _lost(diverged, span)
    yield from _counts()
    for count in (count for count in dict.fromkeys((2, *diverged.counts)) if count > 1):
        words = f"the optimizer steps {count} times per step, each time with the same gradients"
        yield Mistake(Cause.STEPPED_EACH_MICROBATCH, words, partial(_repeat_step, count=count), is_quick=True)
    yield from exchanged_states(diverged)
    words = "the optimizer updates at the end of the step, after code that should run after the update"
    yield Mistake(Cause.STALE, words, _step_late, is_quick=True)


def _who(diverged: Evidence) -> Iterator[Who]:
    everyone = range(diverged.num_ranks)
    yield everyone, ""
    if len(everyone) > 1:
        for rank in everyone:
            yield [rank], name_ranks([rank])
    for rank in everyone if len(everyone) > 2 else ():
        yield [other for other in everyone if other != rank], f"every rank but {rank}"


def _elements(diverged: Evidence) -> Iterator[tuple[Masks | None, str]]:
    """Yield all elements, and the first differing elements after an update."""
    yield None, ""
    if diverged.first.phase is Phase.UPDATE:
        masks = {name: mask for name, mask in wrong_elements(diverged, Phase.UPDATE).items() if name in diverged.updated}
        is_full = all(mask.all() for mask in masks.values())
        if masks and not (is_full and set(masks) >= set(diverged.updated)):
            words = rows_of_tensor({name: mask.numpy() for name, mask in masks.items()})
            yield masks, tensors(tuple(masks)) if is_full else words


def _skipped(diverged: Evidence, span: Span) -> Iterator[Mistake]:
    for ranks, who in _who(diverged):
        for masks, what in _elements(diverged) if not who else [(None, "")]:
            words = f"the optimizer does not update {what or 'any parameter'}{f' on {who}' if who else ''}{span.words}"
            for state in (False, True):
                change = partial(_skip_update, on=ranks, masks=masks, span=span, state=state)
                yield Mistake(Cause.NOT_UPDATED, words, change, is_quick=not who)


def _skip_update(ranks: EmulatedRanks, *, on: Collection[int], masks: Masks | None, span: Span, state: bool) -> None:
    """Bug: hide the gradients of full tensors, and undo the update of other elements.

    `state` says if the state of these elements is updated.
    """
    hidden: dict[int, Gradients] = {}
    kept: dict[int, dict[int, torch.Tensor]] = {}

    def undone(rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the tensors to restore: a rank's parameters, and their optimizer state if `state` is False.

        Each has a mask of elements.
        """
        for name, value in ranks.parameters[rank].items():
            mask = torch.ones_like(value, dtype=torch.bool) if masks is None else masks.get(name)
            if mask is not None and name not in hidden.get(rank, {}):
                yield from ((each, mask) for each in (value, *(() if state else state_of(ranks, rank, name))))

    def hide(rank: int, step: int) -> None:
        if rank in on and step in span:
            full = (
                ()
                if state
                else [name for name in ranks.gradients(rank) if masks is None or (name in masks and masks[name].all())]
            )
            hidden[rank] = {name: ranks.gradients(rank)[name] for name in full}
            for name in full:
                ranks.parameters[rank][name].grad = None
            kept[rank] = {id(value): value.detach().clone() for value, _ in undone(rank)}

    def show(rank: int, _step: int) -> None:
        if rank in kept:
            for value, mask in undone(rank):
                value.data[mask] = kept[rank].get(id(value), torch.zeros_like(value))[mask]
            for name, gradient in hidden.pop(rank).items():
                ranks.parameters[rank][name].grad = gradient
            del kept[rank]

    ranks.before_update.append(hide)
    ranks.after_update.append(show)


def _lost(diverged: Evidence, span: Span) -> Iterator[Mistake]:
    """Yield cleared optimizer state, or state with zeroed tensors and the same step count."""
    if diverged.num_steps == 1 or not diverged.has_state:
        return
    when = f" before step {span.first} and each later step" if span.first > 1 else " before each step"
    when = when if span.last is None else f" before step {span.first}, once"
    for on, who in _who(diverged):
        where = f" of {who}" if who else ""
        clear = partial(act_in_span, on=on, span=span, action=_clear_state)
        yield Mistake(Cause.STATE_LOST, f"the optimizer state{where} is lost{when}", clear, is_quick=not who)
        for masks, what in _elements(diverged) if not who else [(None, "")]:
            words = f"the optimizer state{f' of {what}' if what else ''}{where} is zero{when}"
            zero = partial(act_in_span, on=on, span=span, action=partial(_zero_state, masks=masks))
            yield Mistake(Cause.STATE_LOST, words, zero, is_quick=not who)


def _clear_state(ranks: EmulatedRanks, rank: int) -> None:
    ranks.optimizers[rank].state.clear()


def _zero_state(ranks: EmulatedRanks, rank: int, *, masks: Masks | None) -> None:
    for name, value in state_tensors(ranks, rank):
        if masks is None:
            value.zero_()
        elif name in masks and masks[name].shape == value.shape:
            value[masks[name]] = 0


def _counts() -> Iterator[Mistake]:
    for count in (1, 2, 3):
        words = f"the optimizer's step count begins at {count}, not 0: it has stepped before the first batch"
        yield Mistake(Cause.STEP_COUNT, words, partial(_begin_at, count=count), is_quick=True)
    ways: tuple[tuple[str, Callable[[torch.Tensor], object], bool], ...] = (
        ("the optimizer counts every step as the first", lambda count: count.zero_(), True),
        ("the optimizer's step count does not advance", lambda count: count.sub_(1), False),
        ("the optimizer's step count advances twice per step", lambda count: count.add_(1), False),
    )
    for words, way, before in ways:
        yield Mistake(Cause.STEP_COUNT, words, partial(_change_count, way=way, before=before), is_quick=True)


def _begin_at(ranks: EmulatedRanks, *, count: int) -> None:
    """Step with zero gradients, learning rate and decay, so that only the step count changes."""

    def begin(_rank: int, optimizer: Optimizer) -> None:
        settings = [dict(group) for group in optimizer.param_groups]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for group in optimizer.param_groups:
            group.update({key: 0.0 for key in ("lr", "weight_decay") if group.get(key) is not None})
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(count):
            optimizer.step()
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            group.update(before)
        for parameter in parameters:
            parameter.grad = None

    ranks.built.append(begin)


def _change_count(ranks: EmulatedRanks, *, way: Callable[[torch.Tensor], object], before: bool) -> None:
    def count(rank: int, _step: int) -> None:
        for state in ranks.optimizers[rank].state.values():
            if isinstance(state.get("step"), torch.Tensor):
                way(state["step"])

    (ranks.before_update if before else ranks.after_update).append(count)


def _repeat_step(ranks: EmulatedRanks, *, count: int) -> None:
    def repeat(_rank: int, optimizer: Optimizer) -> None:
        own = optimizer.step

        def step_repeatedly(_optimizer: Optimizer) -> None:
            for _ in range(count):
                own()

        # A bound method, because learning-rate schedulers wrap `step.__func__`.
        optimizer.step = MethodType(step_repeatedly, optimizer)  # type: ignore[method-assign]

    ranks.built.append(repeat)


def _step_late(ranks: EmulatedRanks) -> None:
    """Bug: the optimizer steps only after the user's step has returned."""

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
