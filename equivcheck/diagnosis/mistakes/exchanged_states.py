"""Mistakes in optimizer updates that use state from another rank's shard, or from another parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks
from equivcheck.diagnosis.emulation.held_elements import HeldElements, held_elements
from equivcheck.diagnosis.evidence import Evidence, axis_combinations
from equivcheck.diagnosis.mistake import Mistake, Span
from equivcheck.diagnosis.mistakes.optimizer_state import act_in_span, state_tensors
from equivcheck.diagnosis.words import tensors
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.worlds.trace.differences import Phase

Take = Callable[[HeldElements, str, torch.Tensor], None]
"""Function to overwrite each rank's elements in a state tensor. It also gets all held elements and the parameter's name."""


def exchanged_states(diverged: Evidence) -> Iterator[Mistake]:
    """Yield mistakes: optimizer state from another rank's shard, from wrong places in its tensor, or from another parameter."""
    yield from _of_other_elements(diverged)
    yield from _of_another_parameter(diverged)


def _of_other_elements(diverged: Evidence) -> Iterator[Mistake]:
    """Yield optimizer state from another rank's shard, or from wrong places in the full state, before one step or before each."""
    held, everyone = held_elements(diverged), range(diverged.num_ranks)
    if not held.is_sharded or diverged.num_steps == 1:
        return
    first = max(1, diverged.first.step)
    ways: list[tuple[str, Take]] = [
        (f"rank r has the optimizer state of rank r + {distance}", partial(_take_from, sources=sources))
        for distance, sources in held.sources_by_distance()
    ]
    for rank in everyone:
        words = f"every rank has the optimizer state of rank {rank}"
        ways.append((words, partial(_take_from, sources=[rank] * held.num_ranks)))
    splitting = [axis for axis in diverged.wide_axes if any(held.are_split(name, (axis,)) for name in diverged.updated)]
    for axes in sorted(axis_combinations(splitting), key=len):
        words = f"each rank takes its optimizer state from the full state as if {diverged.ranks_text(axes)} did not split it,"
        ways.append((words, partial(_take_unsplit, axes=axes)))
    for span, more in ((Span(first=first, last=first), f" before step {first}"), (Span(first=first), f" from step {first} on")):
        for words, take in ways:
            change = partial(act_in_span, on=everyone, span=span, action=partial(_take_state, take=take))
            yield Mistake(Cause.STATE_OF_ANOTHER, words + more, change, is_quick=True)


def _take_state(ranks: EmulatedRanks, rank: int, *, take: Take) -> None:
    for name, value in state_tensors(ranks, rank):
        take(ranks.held, name, value)


def _take_from(held: HeldElements, name: str, value: torch.Tensor, *, sources: Sequence[int]) -> None:
    held.exchange(name, value, sources)


def _take_unsplit(held: HeldElements, name: str, value: torch.Tensor, *, axes: Sequence[str]) -> None:
    held.take_unsplit(name, value, axes)


def _of_another_parameter(diverged: Evidence) -> Iterator[Mistake]:
    """Yield optimizer state that two of the first wrong parameters exchange, or that is copied from another, before one step."""
    step = diverged.first.step
    if not step or diverged.first.phase is not Phase.UPDATE:
        return
    shapes = {name: values.shape for name, values in diverged.expected_values(step, Phase.UPDATE).items() if values.ndim}
    wrong = [name for name in diverged.differing(Phase.UPDATE) if name in diverged.updated and name in shapes]
    by_shape = [[name for name in wrong if shapes[name] == shape] for shape in dict.fromkeys(shapes[name] for name in wrong)]
    at = Span(first=step, last=step)
    orders: tuple[tuple[str, Callable[[list[str]], list[str]]], ...] = (
        ("the next one", lambda names: [*names[1:], names[0]]),
        ("the previous one", lambda names: [names[-1], *names[:-1]]),
        ("another one, in reverse order", lambda names: names[::-1]),
    )
    for words, order in orders if wrong and all(len(names) > 1 for names in by_shape) else ():
        sources = {name: source for names in by_shape for name, source in zip(names, order(names), strict=True)}
        sentence = f"the optimizer states of {tensors(wrong)} are exchanged before step {step}"
        if len(wrong) > 2:
            sentence = f"before step {step}, each of {tensors(wrong)} gets the optimizer state of {words} with its shape"
        yield Mistake(Cause.STATE_OF_ANOTHER, sentence, partial(_exchange_states, sources=sources, span=at))
    for name in (name for name, shape in shapes.items() if len(wrong) == 1 and name not in wrong and shape == shapes[wrong[0]]):
        sentence = f"`{wrong[0]}` gets the optimizer state of `{name}` before step {step}"
        yield Mistake(Cause.STATE_OF_ANOTHER, sentence, partial(_exchange_states, sources={wrong[0]: name}, span=at))


def _exchange_states(ranks: EmulatedRanks, *, sources: Mapping[str, str], span: Span) -> None:
    def exchange(ranks: EmulatedRanks, rank: int) -> None:
        state, own = ranks.optimizers[rank].state, ranks.parameters[rank]
        found = {name: copy.deepcopy(state[own[source]]) for name, source in sources.items()}
        for name, values in found.items():
            state[own[name]] = values

    act_in_span(ranks, on=range(len(ranks.models)), span=span, action=exchange)
