"""Mistakes in optimizer updates: skipped steps, lost or foreign state, wrong step counts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from types import MethodType

import torch

from equivcheck.diagnosis.words import name_ranks, rows_of_tensor, tensors
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.diverged import DivergedTraining, Masks, held_elements, wrong_elements
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks, Event, Optimizer
from equivcheck.user.diagnosis.mistake import Mistake, Span, StepFacts, spans
from equivcheck.worlds.trace.differences import Phase

Who = tuple[Collection[int], str]
"""Ranks, and words for them. Empty words stand for all ranks."""


def wrong_updates(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield skipped, repeated and late updates, lost or foreign state, and wrong step counts."""
    for span in spans(diverged):
        yield from _skipped(diverged, span)
        yield from _lost(diverged, span)
    yield from _counts()
    for count in (count for count in dict.fromkeys((2, *diverged.counts)) if count > 1):
        words = f"the optimizer steps {count} times per step, each time with the same gradients"
        yield Mistake(Cause.STEPPED_EACH_MICROBATCH, words, partial(_repeat_step, count=count))
    yield from _of_another(diverged)
    yield from _of_another_parameter(diverged)
    words = "the optimizer updates at the end of the step, after code that should run after the update"
    yield Mistake(Cause.STALE, words, _step_late)


def _who(diverged: DivergedTraining) -> Iterator[Who]:
    everyone = range(diverged.task.num_ranks)
    yield everyone, ""
    if len(everyone) > 1:
        for rank in everyone:
            yield [rank], name_ranks([rank])
    for rank in everyone if len(everyone) > 2 else ():
        yield [other for other in everyone if other != rank], f"every rank but {rank}"


def _elements(diverged: DivergedTraining) -> Iterator[tuple[Masks | None, str]]:
    """All elements, and the first that differ after an update."""
    yield None, ""
    if diverged.first.phase is Phase.UPDATE:
        masks = {name: mask for name, mask in wrong_elements(diverged, Phase.UPDATE).items() if name in diverged.updated}
        is_full = all(mask.all() for mask in masks.values())
        if masks and not (is_full and set(masks) >= set(diverged.updated)):
            words = rows_of_tensor({name: mask.numpy() for name, mask in masks.items()})
            yield masks, tensors(tuple(masks)) if is_full else words


def _skipped(diverged: DivergedTraining, span: Span) -> Iterator[Mistake]:
    for ranks, who in _who(diverged):
        for masks, what in _elements(diverged) if not who else [(None, "")]:
            words = f"the optimizer does not update {what or 'any parameter'}{f' on {who}' if who else ''}{span.words}"
            yield Mistake(Cause.NOT_UPDATED, words, partial(_skip_update, on=ranks, masks=masks, span=span))


def _skip_update(ranks: EmulatedUserRanks, *, on: Collection[int], masks: Masks | None, span: Span) -> None:
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


def _lost(diverged: DivergedTraining, span: Span) -> Iterator[Mistake]:
    """State is cleared, or its tensors are zeroed while the step count stays."""
    if len(diverged.task.batches) == 1 or not diverged.single.state.pieces:
        return
    when = f" before step {span.first} and each later step" if span.first > 1 else " before each step"
    when = when if span.last is None else f" before step {span.first}, once"
    for on, who in _who(diverged):
        where = f" of {who}" if who else ""
        clear = partial(_in_span, on=on, span=span, action=_clear_state)
        yield Mistake(Cause.STATE_LOST, f"the optimizer state{where} is lost{when}", clear)
        for masks, what in _elements(diverged) if not who else [(None, "")]:
            words = f"the optimizer state{f' of {what}' if what else ''}{where} is zero{when}"
            zero = partial(_in_span, on=on, span=span, action=partial(_zero_state, masks=masks))
            yield Mistake(Cause.STATE_LOST, words, zero)


def _in_span(
    ranks: EmulatedUserRanks, *, on: Collection[int], span: Span, action: Callable[[EmulatedUserRanks, int], None]
) -> None:
    """Act before each update in a range of steps, on some ranks."""

    def act(rank: int, step: int) -> None:
        if rank in on and step in span:
            action(ranks, rank)

    ranks.before_update.append(act)


def _clear_state(ranks: EmulatedUserRanks, rank: int) -> None:
    ranks.optimizers[rank].state.clear()


def _zero_state(ranks: EmulatedUserRanks, rank: int, *, masks: Masks | None) -> None:
    for name, parameter, value in _state_tensors(ranks, rank):
        if masks is None:
            value.zero_()
        elif name in masks and masks[name].shape == parameter.shape:
            value[masks[name]] = 0


def _state_tensors(ranks: EmulatedUserRanks, rank: int) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Names, parameters, and state tensors in the parameter's shape."""
    state = ranks.optimizers[rank].state
    return [
        (name, parameter, value)
        for name, parameter in ranks.parameters[rank].items()
        for value in state.get(parameter, {}).values()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and parameter.dim()
    ]


def _counts() -> Iterator[Mistake]:
    for count in (1, 2, 3):
        words = f"the optimizer's step count begins at {count}, not 0: it has stepped before the first batch"
        yield Mistake(Cause.STEP_COUNT, words, partial(_begin_at, count=count))
    ways: tuple[tuple[str, Callable[[torch.Tensor], object], bool], ...] = (
        ("the optimizer counts every step as the first", lambda count: count.zero_(), True),
        ("the optimizer's step count does not advance", lambda count: count.sub_(1), False),
        ("the optimizer's step count advances twice per step", lambda count: count.add_(1), False),
    )
    for words, way, before in ways:
        yield Mistake(Cause.STEP_COUNT, words, partial(_change_count, way=way, before=before))


def _begin_at(ranks: EmulatedUserRanks, *, count: int) -> None:
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


def _change_count(ranks: EmulatedUserRanks, *, way: Callable[[torch.Tensor], object], before: bool) -> None:
    def count(rank: int, _step: int) -> None:
        for state in ranks.optimizers[rank].state.values():
            if isinstance(state.get("step"), torch.Tensor):
                way(state["step"])

    events: list[Event] = ranks.before_update if before else ranks.after_update
    events.append(count)


def _of_another(diverged: DivergedTraining) -> Iterator[Mistake]:
    """Optimizer state from another rank's shard, before one step or before each."""
    held, everyone = held_elements(diverged), range(diverged.task.num_ranks)
    if not held.is_sharded or len(diverged.task.batches) == 1:
        return
    first = max(1, diverged.first.step)
    shifts = held.sources_by_distance()
    sources = [(f"rank r has the optimizer state of rank r + {distance}", found) for distance, found in shifts]
    sources += [(f"every rank has the optimizer state of rank {rank}", [rank] * held.num_ranks) for rank in everyone]
    for span, more in ((Span(first=first, last=first), f" before step {first}"), (Span(first=first), f" from step {first} on")):
        for words, found in sources:
            change = partial(_in_span, on=everyone, span=span, action=partial(_take_state, sources=found))
            yield Mistake(Cause.STATE_OF_ANOTHER, words + more, change)


def _of_another_parameter(diverged: DivergedTraining) -> Iterator[Mistake]:
    """Optimizer state exchanged between the first wrong parameters, or copied from another one, before one step."""
    step = diverged.first.step
    if not step or diverged.first.phase is not Phase.UPDATE:
        return
    shapes = {name: values.shape for name, values in diverged.expected_values(step, Phase.UPDATE).items() if values.ndim}
    wrong = [name for name in diverged.differing(Phase.UPDATE) if name in diverged.updated and name in shapes]
    alike = [[name for name in wrong if shapes[name] == shape] for shape in dict.fromkeys(shapes[name] for name in wrong)]
    at = Span(first=step, last=step)
    orders: tuple[tuple[str, Callable[[list[str]], list[str]]], ...] = (
        ("the next one", lambda names: [*names[1:], names[0]]),
        ("the previous one", lambda names: [names[-1], *names[:-1]]),
        ("another one, in reverse order", lambda names: names[::-1]),
    )
    for words, order in orders if wrong and all(len(names) > 1 for names in alike) else ():
        sources = {name: source for names in alike for name, source in zip(names, order(names), strict=True)}
        sentence = f"the optimizer states of {tensors(wrong)} are exchanged before step {step}"
        if len(wrong) > 2:
            sentence = f"before step {step}, each of {tensors(wrong)} gets the optimizer state of {words} with its shape"
        yield Mistake(Cause.STATE_OF_ANOTHER, sentence, partial(_exchange_states, sources=sources, span=at))
    for name in (name for name, shape in shapes.items() if len(wrong) == 1 and name not in wrong and shape == shapes[wrong[0]]):
        sentence = f"`{wrong[0]}` gets the optimizer state of `{name}` before step {step}"
        yield Mistake(Cause.STATE_OF_ANOTHER, sentence, partial(_exchange_states, sources={wrong[0]: name}, span=at))


def _exchange_states(ranks: EmulatedUserRanks, *, sources: Mapping[str, str], span: Span) -> None:
    def exchange(ranks: EmulatedUserRanks, rank: int) -> None:
        state, own = ranks.optimizers[rank].state, ranks.parameters[rank]
        found = {name: copy.deepcopy(state[own[source]]) for name, source in sources.items()}
        for name, values in found.items():
            state[own[name]] = values

    _in_span(ranks, on=range(len(ranks.models)), span=span, action=exchange)


def _take_state(ranks: EmulatedUserRanks, rank: int, *, sources: list[int]) -> None:
    for name, _, value in _state_tensors(ranks, rank):
        ranks.held.exchange(name, value, sources)


def _repeat_step(ranks: EmulatedUserRanks, *, count: int) -> None:
    def repeat(_rank: int, optimizer: Optimizer) -> None:
        own = optimizer.step

        def step_repeatedly(_optimizer: Optimizer) -> None:
            for _ in range(count):
                own()

        # A bound method, because learning-rate schedulers wrap `step.__func__`.
        optimizer.step = MethodType(step_repeatedly, optimizer)  # type: ignore[method-assign]

    ranks.built.append(repeat)


def _step_late(ranks: EmulatedUserRanks) -> None:
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
