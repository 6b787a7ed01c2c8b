"""Mistakes in optimizer settings and schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import isclose
from typing import Any

import torch

from equivcheck.diagnosis.words import count_description, tensors
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.catalogue.schedules import are_equal, right_settings, settings_at_steps
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks, Optimizer
from equivcheck.user.diagnosis.mistake import Mistake, StepFacts

Others = dict[str, dict[str, tuple[float, float]]]
"""Settings that differ for each parameter, as pairs of single-device value and rank value."""


def wrong_settings(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield the ranks' settings, then schedules, then common mistakes. Settings known to be right are no mistake."""
    others = [_others(diverged, rank) for rank in range(diverged.task.num_ranks)]
    if any(others):
        words = f"the optimizer runs with wrong settings: {_describe_settings(diverged, others)}"
        yield Mistake(Cause.HYPERPARAMETER, words, partial(_apply_settings, others=others))
    yield from settings_at_steps(diverged)
    right = right_settings(diverged)
    if diverged.task.scheduler is not None and "lr" not in right:
        times = dict.fromkeys((0, 2, diverged.num_microbatches, diverged.task.num_ranks))
        for count in (count for count in times if count != 1):
            words = "the schedule never advances" if not count else f"the schedule advances {count} times per step"
            yield Mistake(Cause.SCHEDULE, words, partial(_change_schedule, change=partial(_repeat_step, times=count)))
        words = "the schedule advances before the update, not after it"
        yield Mistake(Cause.SCHEDULE, words, partial(_change_schedule, change=lambda scheduler: scheduler.step()))
    for key in (key for key in ("lr", "weight_decay") if key not in right):
        for factor in dict.fromkeys(each for size in diverged.counts for each in (float(size), 1 / size)):
            if factor != 1.0:
                words = f"the optimizer runs with {factor:g} times the {key}{count_description(diverged, factor)}"
                yield Mistake(Cause.HYPERPARAMETER, words, _on_groups(_multiply, key=key, factor=factor))
    for cause, words, key, factor in (
        (Cause.HYPERPARAMETER, "weight decay is not applied", "weight_decay", 0.0),
        (Cause.HYPERPARAMETER, "momentum is not applied", "momentum", 0.0),
        (Cause.DECAY_TWICE, "weight decay is applied twice", "weight_decay", 2.0),
    ):
        yield Mistake(cause, words, _on_groups(_multiply, key=key, factor=factor))
    for choose, which in ((max, "largest"), (min, "smallest")) if "weight_decay" not in right else ():
        words = f"all parameters have the {which} weight decay of any group"
        yield Mistake(Cause.DECAY_EVERYWHERE, words, _on_groups(_share_decay, choose=choose))


def _others(diverged: DivergedTraining, rank: int) -> Others:
    found: Others = {}
    trace: Any = diverged.traces[rank]
    for name, numbers in trace.settings.items():
        right = diverged.single.settings.get(name, {})
        differing = {
            key: (right[key], value) for key, value in numbers.items() if key in right and not are_equal(right[key], value)
        }
        if differing:
            found[name] = differing
    return found


def _describe_settings(diverged: DivergedTraining, others: list[Others]) -> str:
    """``lr is 0.02, not 0.01 (2 times, the number of the 2 dp ranks)``, with parameters and ranks."""
    rank = next(rank for rank, each in enumerate(others) if each)
    key, (right, wrong) = next(iter(next(iter(others[rank].values())).items()))
    ratio = wrong / right if right else 0.0
    near = next(
        (each for size in diverged.counts for each in (float(size), 1 / size) if isclose(each, ratio, rel_tol=1e-9)), ratio
    )
    times = f" ({near:g} times{count_description(diverged, near)})" if near else ""
    names = tuple(each for each, found in others[rank].items() if key in found)
    whose = "" if len(names) == len(diverged.single.settings) else f" for {tensors(names)}"
    where = "" if all(others) else f" on rank {rank}"
    return f"{key} is {wrong:g}, not {right:g}{times}{whose}{where}"


def _apply_settings(ranks: EmulatedUserRanks, *, others: list[Others]) -> None:
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


def _on_groups(edit: Callable[..., None], **options: Any) -> Callable[[EmulatedUserRanks], None]:
    return lambda ranks: ranks.built.append(lambda _rank, optimizer: edit(optimizer.param_groups, **options))


def _multiply(groups: list[dict[str, Any]], *, key: str, factor: float) -> None:
    for group in groups:
        if isinstance(group.get(key), (int, float)):
            group[key] = group[key] * factor


def _share_decay(groups: list[dict[str, Any]], *, choose: Callable[[list[float]], float]) -> None:
    decays = [group["weight_decay"] for group in groups if "weight_decay" in group]
    for group in groups if decays else ():
        group["weight_decay"] = choose(decays)


def _change_schedule(ranks: EmulatedUserRanks, *, change: Callable[[Any], None]) -> None:
    own = ranks.task.scheduler
    assert own is not None, "the training has a schedule"

    def build(optimizer: Optimizer) -> Any:
        scheduler = own(optimizer)
        change(scheduler)
        return scheduler

    ranks.task = replace(ranks.task, scheduler=build)


def _repeat_step(scheduler: Any, *, times: int) -> None:
    step = scheduler.step

    def step_repeatedly() -> None:
        for _ in range(times):
            step()

    scheduler.step = step_repeatedly
