"""Mistakes with parameters: no gradients, frozen ones that train, weights no longer shared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from equivcheck.diagnosis.mistake import Mistake, Span, StepFacts
from equivcheck.diagnosis.words import gradients, join_words, name_ranks, tensors
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.diverged import DivergedTraining, parameters_by_name
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.ranks import build_model
from equivcheck.user.traces.settings import UserTrace
from equivcheck.worlds.trace.differences import Difference, Phase
from equivcheck.worlds.trace.trace import Snapshot

SYNC_OFF = "as FSDP2 leaves gradients while their sync is off (`set_requires_gradient_sync(False)`)"


def missing_gradients(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes that lose or delay gradients, if the first divergence is a gradient that is None on ranks.

    Delayed gradients are added to those of a later step.
    """
    if diverged.first.difference is not Difference.MISSING or diverged.first.phase is not Phase.GRADIENT:
        return
    missing = [[_missing_in(step.gradients, diverged.updated) for step in trace.steps] for trace in diverged.traces]
    first, last = diverged.first.step, len(diverged.task.batches) - 1
    ranks = [rank for rank, steps in enumerate(missing) if steps[first]]
    where = "" if len(ranks) == len(missing) else f" on {name_ranks(ranks)}"
    names = tuple(name for name in diverged.updated if any(name in steps[first] for steps in missing))
    traces: Sequence[UserTrace | Any] = diverged.traces
    units = {unit for trace in traces for unit in trace.casting}
    why = f", {SYNC_OFF}" if any(not unit or name.startswith(f"{unit}.") for unit in units for name in names) else ""
    numbers = [number for number in range(first, last + 1) if any(steps[number] for steps in missing)]
    is_to_the_end = numbers == list(range(first, last + 1))
    listed = f", at step{'' if len(numbers) == 1 else 's'} {join_words([str(number) for number in numbers])}"
    when = Span(first=first).words if is_to_the_end else listed
    words = f"{gradients(diverged, names)} None{where} when the optimizer steps{when}{why}"
    yield Mistake(Cause.GRADIENT_LOST, words, partial(_lose_gradients, missing=missing, keeps=False))
    if not is_to_the_end:
        words = f"{words}; the missing gradients are added to those of the next step that has any"
        yield Mistake(Cause.GRADIENT_LOST, words, partial(_lose_gradients, missing=missing, keeps=True))


def _missing_in(gradients: Snapshot, names: Sequence[str]) -> set[str]:
    there = zip(gradients.pieces, gradients.present, strict=True)
    return {piece.name for piece, is_present in there if piece.numel and not is_present and piece.name in names}


def _lose_gradients(ranks: EmulatedUserRanks, *, missing: Sequence[Sequence[set[str]]], keeps: bool) -> None:
    """Set each rank's missing gradients to None at each step. If `keeps`, add them to the gradients of a later step."""
    kept: dict[tuple[int, str], torch.Tensor] = {}

    def lose(rank: int, step: int) -> None:
        for name, value in ranks.parameters[rank].items():
            if value.grad is None:
                continue
            total = value.grad + kept.pop((rank, name), torch.zeros_like(value.grad))
            value.grad = None if name in missing[rank][step] else total
            if value.grad is None and keeps:
                kept[rank, name] = total

    ranks.after_backward.append(lose)


def trained_frozen(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield a possible mistake: ranks train parameters that are frozen on one device."""
    found = diverged.found_values(diverged.first.step, Phase.GRADIENT)
    names = tuple(name for name in diverged.differing(Phase.GRADIENT) if name in found and name not in diverged.updated)
    if diverged.first.difference is Difference.EXTRA and names:
        words = f"{tensors(names)} {'is' if len(names) == 1 else 'are'} frozen on one device, but trained on your ranks"
        yield Mistake(Cause.NOT_FROZEN, words, partial(_unfreeze, names=names), is_quick=True)


def zeros_for_none(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield a possible mistake: gradients that are None on one device are zeros on ranks, so that weight decay is applied."""
    at, found = (diverged.first.step, Phase.GRADIENT), diverged.found_values(diverged.first.step, Phase.GRADIENT)
    extra = [each.tensor for each in diverged.divergences if (each.step, each.phase, each.difference) == (*at, Difference.EXTRA)]
    names = tuple(dict.fromkeys(extra))
    if names and not any(found[name].any() for name in names if name in found):
        them = "this parameter" if len(names) == 1 else "these parameters"
        words = f"{gradients(diverged, names)} None on one device, but zero on your ranks, so the optimizer does not skip {them}"
        yield Mistake(Cause.NOT_FROZEN, words, partial(_fill_gradients, names=names), is_quick=True)


def _fill_gradients(ranks: EmulatedUserRanks, *, names: Sequence[str]) -> None:
    def fill(rank: int, _step: int) -> None:
        for name in names:
            parameter = ranks.parameters[rank][name]
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    ranks.after_backward.append(fill)


def _unfreeze(ranks: EmulatedUserRanks, *, names: Sequence[str]) -> None:
    ranks.known = None  # a correct backward pass leaves these gradients out
    for parameters in ranks.parameters:
        for name in names:
            parameters[name].requires_grad_(True)


def wrong_sharing(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield a possible mistake: ranks have a copy of a weight that is shared on one device, and update it separately or never."""
    places: dict[int, list[str]] = {}
    for name, parameter in build_model(diverged.task).named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    for first, *others in (names for names in places.values() if len(names) > 1):
        for trained, fate in ((True, "updated on its own"), (False, "never updated")):
            for replaced in (others, [first]) if trained else (others,):
                names = "`, `".join(others)
                words = f"`{first}` and `{names}` are no longer one parameter: `{replaced[0]}` is a copy that is {fate}"
                yield Mistake(Cause.UNTIED, words, partial(_untie, names=replaced, trained=trained))


def _untie(ranks: EmulatedUserRanks, *, names: list[str], trained: bool) -> None:
    for rank, model in enumerate(ranks.models):
        for name in names:
            owner_name, _, key = name.rpartition(".")
            owner = model.get_submodule(owner_name)
            setattr(owner, key, nn.Parameter(getattr(owner, key).detach().clone(), requires_grad=trained))
        ranks.parameters[rank] = parameters_by_name(model)
