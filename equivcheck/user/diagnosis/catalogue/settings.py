"""Mistakes in optimizer settings and schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import isclose
from typing import Any

import torch

from equivcheck.diagnosis.words import number_of, tensors
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.counterfactual import Change, Counterfactual, Honest
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedRanks, Optimizer

NEAR = 1e-14
"""Relative difference up to which settings are equal. Settings are not computed by sums, so it is tight."""
Others = dict[str, dict[str, tuple[float, float]]]
"""Differing settings for each parameter, as pairs of single-device and rank value."""


def wrong_settings(diverged: DivergedTraining, _honest: Honest) -> Iterator[Counterfactual]:
    """Yield the ranks' final settings, then common mistakes, then schedules."""
    others = [_others(diverged, rank) for rank in range(diverged.task.num_ranks)]
    if any(others):
        words = "the optimizer runs with wrong settings: " + _told(diverged, others)
        yield Counterfactual(cause=Cause.HYPERPARAMETER, sentence=words, change=lambda ranks: _set(ranks, others))
    if diverged.task.scheduler is not None:
        times = dict.fromkeys((0, 2, diverged.num_microbatches, diverged.task.num_ranks))
        for count in (count for count in times if count != 1):
            words = "the schedule never advances" if not count else f"the schedule advances {count} times per step"
            yield Counterfactual(cause=Cause.SCHEDULE, sentence=words, change=_advancing(count))
        words = "the schedule advances before the update, not after it"
        yield Counterfactual(cause=Cause.SCHEDULE, sentence=words, change=_ahead)
    for key in ("lr", "weight_decay"):
        for factor in dict.fromkeys(each for size in diverged.counts for each in (float(size), 1 / size)):
            if factor != 1.0:
                words = f"the optimizer runs with {factor:g} times the {key}{number_of(diverged, factor)}"
                yield Counterfactual(cause=Cause.HYPERPARAMETER, sentence=words, change=_times(key, factor))
    yield Counterfactual(cause=Cause.HYPERPARAMETER, sentence="weight decay is not applied", change=_times("weight_decay", 0.0))
    yield Counterfactual(cause=Cause.HYPERPARAMETER, sentence="momentum is not applied", change=_times("momentum", 0.0))
    yield Counterfactual(cause=Cause.DECAY_TWICE, sentence="weight decay is applied twice", change=_times("weight_decay", 2.0))
    yield from _decays()


def _others(diverged: DivergedTraining, rank: int) -> Others:
    found: Others = {}
    trace: Any = diverged.traces[rank]
    for name, numbers in trace.settings.items():
        right = diverged.single.settings.get(name, {})
        differing = {
            key: (right[key], value)
            for key, value in numbers.items()
            if key in right and not isclose(right[key], value, rel_tol=NEAR)
        }
        if differing:
            found[name] = differing
    return found


def _told(diverged: DivergedTraining, others: list[Others]) -> str:
    """``lr is 0.02, not 0.01 (2 times, the number of the 2 dp ranks)``, with parameters and ranks."""
    rank = next(rank for rank, each in enumerate(others) if each)
    key, (right, wrong) = next(iter(next(iter(others[rank].values())).items()))
    ratio = wrong / right if right else 0.0
    near = next(
        (each for size in diverged.counts for each in (float(size), 1 / size) if isclose(each, ratio, rel_tol=1e-9)), ratio
    )
    times = f" ({near:g} times{number_of(diverged, near)})" if near else ""
    names = tuple(each for each, found in others[rank].items() if key in found)
    whose = "" if len(names) == len(diverged.single.settings) else f" for {tensors(names)}"
    where = "" if all(others) else f" on rank {rank}"
    return f"{key} is {wrong:g}, not {right:g}{times}{whose}{where}"


def _set(ranks: EmulatedRanks, others: list[Others]) -> None:
    """Split groups by differing settings. A learning rate is multiplied because a schedule starts from it."""

    def split(rank: int, optimizer: Optimizer) -> None:
        names = {id(value): name for name, value in ranks.parameters[rank].items()}
        groups = list(optimizer.param_groups)
        optimizer.param_groups.clear()
        for group in groups:
            sets: dict[tuple[Any, ...], list[torch.Tensor]] = {}
            for parameter in group["params"]:
                found = others[rank].get(names.get(id(parameter), ""), {})
                sets.setdefault(tuple(sorted(found.items())), []).append(parameter)
            optimizer.param_groups += [_changed(dict(group), dict(found)) | {"params": some} for found, some in sets.items()]

    ranks.built.append(split)


def _changed(group: dict[str, Any], found: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    for key, (right, wrong) in found.items():
        name, _, index = key.rstrip("]").partition("[")
        if index:
            values = list(group[name])
            values[int(index)] = wrong
            group[name] = type(group[name])(values)
        elif name == "lr" and right:
            group[name] = group[name] * (wrong / right)
        else:
            group[name] = wrong
    return group


def _times(key: str, factor: float) -> Change:
    def multiply(_rank: int, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            if isinstance(group.get(key), (int, float)):
                group[key] = group[key] * factor

    return lambda ranks: ranks.built.append(multiply)


def _advancing(times: int) -> Change:
    def change(ranks: EmulatedRanks) -> None:
        own = ranks.task.scheduler
        assert own is not None, "the training has a schedule"

        def build(optimizer: Optimizer) -> Any:
            scheduler = own(optimizer)
            step = scheduler.step
            scheduler.step = partial(_repeated, step, times)  # type: ignore[method-assign]
            return scheduler

        ranks.task = replace(ranks.task, scheduler=build)

    return change


def _repeated(step: Callable[[], None], times: int) -> None:
    for _ in range(times):
        step()


def _ahead(ranks: EmulatedRanks) -> None:
    own = ranks.task.scheduler
    assert own is not None, "the training has a schedule"

    def build(optimizer: Optimizer) -> Any:
        scheduler = own(optimizer)
        scheduler.step()
        return scheduler

    ranks.task = replace(ranks.task, scheduler=build)


def _decays() -> Iterator[Counterfactual]:
    """One group's weight decay for all groups."""

    def of_all(largest: bool) -> Change:
        def change(_rank: int, optimizer: Optimizer) -> None:
            decays = [group["weight_decay"] for group in optimizer.param_groups if "weight_decay" in group]
            for group in optimizer.param_groups:
                if decays:
                    group["weight_decay"] = max(decays) if largest else min(decays)

        return lambda ranks: ranks.built.append(change)

    for largest, which in ((True, "largest"), (False, "smallest")):
        words = f"all parameters have the {which} weight decay of any group"
        yield Counterfactual(cause=Cause.DECAY_EVERYWHERE, sentence=words, change=of_all(largest))
