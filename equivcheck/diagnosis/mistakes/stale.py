"""Mistakes with parameters or gradients from an earlier step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import torch

from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks
from equivcheck.diagnosis.emulation.held_elements import held_elements
from equivcheck.diagnosis.evidence import Evidence
from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.diagnosis.words import name_ranks, tensors
from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.pieces import values_by_piece
from equivcheck.worlds.trace.trace import Snapshot

MAX_TENSORS = 24
"""Largest number of parameters to try one by one."""
DIGITS = 1e-12
"""Machine epsilon below which an old parameter changes the loss by more than its tolerance."""


def stale_values(diverged: Evidence, facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes with values from an earlier step: parameters in forward, gradients, or updated shards of other ranks."""
    first = diverged.first
    if diverged.num_steps == 1 or (not first.step and first.phase is Phase.LOSS):
        return  # before the first loss, nothing is old
    if first.step and (first.phase is Phase.LOSS or (first.phase is Phase.GRADIENT and not _is_loss_right(diverged))):
        yield from _old_parameters(diverged)
    for words, zero in (("from the previous step", False), ("from the previous step, and zero at the first step", True)):
        for late in (False, True):
            sentence = f"gradients are {words}{', also when they are clipped' if not late and facts.clips else ''}"
            yield Mistake(Cause.STALE, sentence, partial(_swap_gradients, zero=zero, late=late), is_quick=True)
    yield Mistake(Cause.STALE, "the optimizer uses the gradients of the previous step", _update_by_old_gradients, is_quick=True)
    if first.phase is Phase.UPDATE:
        yield from _gathered_late(diverged)


def _is_loss_right(diverged: Evidence) -> bool:
    """Whether ranks report the right loss at the first wrong step, in enough digits to exclude old parameters.

    An earlier difference in this loss would be the first difference.
    """
    place = (diverged.first.step, Phase.LOSS)
    pairs = zip(diverged.reference.moments, diverged.found, strict=True)
    found = [moment for expected, each in pairs if (expected.step, expected.phase) == place for moment in each]
    return diverged.eps < DIGITS and any(all(moment.snapshot.present) for moment in found)


def _old_parameters(diverged: Evidence) -> Iterator[Mistake]:
    words = "loss and gradients are computed with"
    for first, which in ((False, "previous"), (True, "first")):
        change = partial(_load_old, names=None, first=first)
        yield Mistake(Cause.STALE, f"{words} the parameters of the {which} step", change, is_quick=True)
    if held_elements(diverged).is_sharded:
        sentence = "each rank computes with other ranks' shards from the previous step: they are gathered too early"
        yield Mistake(Cause.STALE, sentence, partial(_load_old, names=None, first=False, foreign_only=True))
    for name in diverged.updated[:MAX_TENSORS]:
        for first, which in ((False, "previous"), (True, "first")):
            change = partial(_load_old, names=(name,), first=first)
            yield Mistake(Cause.STALE, f"{words} `{name}` from the {which} step", change, is_quick=True)
    modules = dict.fromkeys(name.rpartition(".")[0] for name in diverged.updated)
    for module in list(modules)[:MAX_TENSORS]:
        names = tuple(name for name in diverged.updated if name.rpartition(".")[0] == module)
        if 1 < len(names) < len(diverged.updated):
            change = partial(_load_old, names=names, first=False)
            yield Mistake(Cause.STALE, f"{words} {tensors(names)} from the previous step", change, is_quick=True)


def _load_old(ranks: EmulatedRanks, *, names: tuple[str, ...] | None, first: bool, foreign_only: bool = False) -> None:
    """Bug: compute with parameters from the first or the previous step; with `foreign_only`, only with other ranks' elements."""
    kept: dict[int, list[Gradients]] = {}

    def load_old(rank: int, _step: int) -> None:
        own, mine = ranks.parameters[rank], kept.setdefault(rank, [])
        mine.append({name: own[name].detach().clone() for name in names or own})
        for name, value in (mine[0] if first else mine[max(0, len(mine) - 2)]).items():
            mask = ~ranks.held.by(name, rank) if foreign_only else ...
            own[name].data[mask] = value[mask]

    def restore(rank: int, _step: int) -> None:
        for name, value in kept[rank][-1].items():
            ranks.parameters[rank][name].data.copy_(value)

    ranks.before_step.append(load_old)
    ranks.before_reading.append(restore)


def _set_gradients(ranks: EmulatedRanks, rank: int, values: Mapping[str, torch.Tensor]) -> None:
    for name, value in values.items():
        ranks.parameters[rank][name].grad = value.clone()


def _swap_gradients(ranks: EmulatedRanks, *, zero: bool, late: bool) -> None:
    """Bug: use the previous step's gradients, swapped before clipping, or (`late`) before gradients are read."""
    kept: dict[int, Gradients] = {}

    def swap(rank: int, _step: int) -> None:
        fresh = {name: value.clone() for name, value in ranks.gradients(rank).items()}
        first = {name: torch.zeros_like(value) for name, value in fresh.items()} if zero else fresh
        _set_gradients(ranks, rank, kept.get(rank, first))
        kept[rank] = fresh

    (ranks.before_reading if late else ranks.after_backward).append(swap)


def _update_by_old_gradients(ranks: EmulatedRanks) -> None:
    kept: dict[int, list[Gradients]] = {}

    def hide(rank: int, _step: int) -> None:
        mine = kept.setdefault(rank, [])
        mine.append({name: value.clone() for name, value in ranks.gradients(rank).items()})
        _set_gradients(ranks, rank, mine[max(0, len(mine) - 2)])

    ranks.before_update.append(hide)
    ranks.after_update.append(lambda rank, _step: _set_gradients(ranks, rank, kept[rank][-1]))


def _gathered_late(diverged: Evidence) -> Iterator[Mistake]:
    """Yield elements updated by some ranks, but not by all: other ranks' shards arrive a step late, or never."""
    masks = _left_behind(diverged)
    if not any(masks):
        return
    who = name_ranks([rank for rank, mine in enumerate(masks) if mine])
    words = f"on {who}, other ranks' parameters are from the previous step: they are gathered before the update"
    yield Mistake(Cause.STALE, words, partial(_delay_updates, masks=masks, for_ever=False))
    words = f"updates by other ranks never reach {who}"
    yield Mistake(Cause.NOT_UPDATED, words, partial(_delay_updates, masks=masks, for_ever=True))


def _left_behind(diverged: Evidence) -> list[dict[str, torch.Tensor]]:
    """Return, for each rank, elements of full tensors left unchanged by its first wrong update although they should change.

    Elements that no rank has changed are left out: nobody updates them.
    """
    step = diverged.first.step
    if (not step and not diverged.initial) or len(diverged.traces[0].steps) < diverged.num_steps:
        return []
    found = []
    for rank, trace in enumerate(diverged.traces):
        before = dict(_values(trace.steps[step - 1].parameters if step else diverged.initial[rank]))
        after, expected = dict(_values(trace.steps[step].parameters)), diverged.expected_values(step, Phase.UPDATE)
        found.append(
            {
                name: torch.from_numpy(np.asarray((after[name] == before[name]) & (expected[name] != before[name])))
                for name in after
                if name in before and name in expected and after[name].shape == expected[name].shape == before[name].shape
            }
        )
    for name in dict.fromkeys(name for mine in found for name in mine):
        by_nobody = torch.stack([mine[name] for mine in found if name in mine]).all(0)
        for mine in found:
            if name in mine:
                mine[name] = mine[name] & ~by_nobody
    return [{name: mask for name, mask in mine.items() if mask.any()} for mine in found]


def _values(snapshot: Snapshot) -> Iterator[tuple[str, np.ndarray]]:
    for piece, values in values_by_piece(snapshot):
        if values is not None and values.size == int(np.prod(piece.shape, dtype=int)):
            yield piece.name, values.reshape(piece.shape)


def _delay_updates(ranks: EmulatedRanks, *, masks: list[dict[str, torch.Tensor]], for_ever: bool) -> None:
    previous = [{name: value.detach().clone() for name, value in ranks.parameters[0].items()}]

    def lag(values: list[Gradients]) -> list[None]:
        fresh = {}
        for name, value in values[0].items():
            fresh[name] = value.clone()
            for rank, each in enumerate(values):
                mask = masks[rank].get(name)
                fresh[name] = each[name].clone() if mask is None else torch.where(mask, fresh[name], each[name])
        for rank, each in enumerate(values):
            for name, mask in masks[rank].items():
                each[name][mask] = previous[0][name][mask]
        previous[0] = previous[0] if for_ever else fresh
        return [None] * len(values)

    def delay_parameters(rank: int, _step: int) -> None:
        ranks.exchange(rank, {name: value.data for name, value in ranks.parameters[rank].items()}, lag)

    ranks.after_update.append(delay_parameters)
