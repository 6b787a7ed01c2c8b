"""Mistakes in optimizer settings and schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import isclose
from typing import Any

import torch

from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks, Optimizer
from equivcheck.diagnosis.evidence import Evidence
from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.diagnosis.mistakes.schedules import differing_settings, equal_settings, settings_at_steps
from equivcheck.diagnosis.words import count_description, tensors
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.training.update.settings import set_number

Others = dict[str, dict[str, tuple[float, float]]]
"""Settings that differ for each parameter, as pairs of single-device value and rank value."""


def wrong_settings(diverged: Evidence, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes in optimizer settings that may explain why ranks differ from one device.

    First come recorded settings that differ between ranks and one device. Then come wrong schedules, a multiplied
    lr or weight decay, and an optimizer without momentum. The lr and the weight decay are not multiplied if they are known to be
    equal on ranks and one device.
    """
    others = [_others(diverged, rank) for rank in range(len(diverged.settings))]
    if any(others):
        words = f"the optimizer runs with wrong settings: {_describe_settings(diverged, others)}"
        same = all(each == others[0] for each in others)
        yield Mistake(_cause_of(diverged, others), words, partial(_apply_settings, others=others), is_quick=same)
    at_steps = list(settings_at_steps(diverged))
    yield from (each for each in at_steps if each.cause is Cause.SCHEDULE)
    right = equal_settings(diverged)
    if diverged.has_schedule and "lr" not in right:
        times = dict.fromkeys((0, 2, diverged.num_microbatches, diverged.num_ranks))
        for count in (count for count in times if count != 1):
            words = "the schedule never advances" if not count else f"the schedule advances {count} times per step"
            yield Mistake(Cause.SCHEDULE, words, _on_schedule(partial(_repeat_step, times=count)), is_quick=True)
        words = "the schedule advances before the update, not after it"
        yield Mistake(Cause.SCHEDULE, words, _on_schedule(lambda scheduler: scheduler.step()), is_quick=True)
    yield from (each for each in at_steps if each.cause is not Cause.SCHEDULE)
    for key in (key for key in ("lr", "weight_decay") if key not in right):
        for factor in dict.fromkeys(each for size in diverged.counts for each in (float(size), 1 / size)):
            if factor != 1.0:
                words = f"the optimizer runs with {factor:g} times the {key}{count_description(diverged, factor)}"
                yield Mistake(Cause.HYPERPARAMETER, words, _on_groups(_multiply, key=key, factor=factor), is_quick=True)
    for cause, words, key, factor in (
        (Cause.HYPERPARAMETER, "weight decay is not applied", "weight_decay", 0.0),
        (Cause.HYPERPARAMETER, "momentum is not applied", "momentum", 0.0),
        (Cause.DECAY_TWICE, "weight decay is applied twice", "weight_decay", 2.0),
    ):
        yield Mistake(cause, words, _on_groups(_multiply, key=key, factor=factor), is_quick=True)
    for choose, which in ((max, "largest"), (min, "smallest")) if "weight_decay" not in right else ():
        words = f"all parameters have the {which} weight decay of any group"
        yield Mistake(Cause.DECAY_EVERYWHERE, words, _on_groups(_share_decay, choose=choose), is_quick=True)


def _others(diverged: Evidence, rank: int) -> Others:
    found, right, actual = Others(), diverged.right_settings, diverged.settings[rank]
    for _, name, key in differing_settings((right,), (actual,)):
        found.setdefault(name, {})[key] = (right[name][key], actual[name][key])
    return found


def _cause_of(diverged: Evidence, others: list[Others]) -> Cause:
    found = [pairs for each in others for pairs in each.values()]
    decays = {numbers.get("weight_decay") for numbers in diverged.right_settings.values()}
    if any(set(pairs) != {"weight_decay"} for pairs in found):
        return Cause.HYPERPARAMETER
    pairs = [each["weight_decay"] for each in found]
    if all(wrong == 2 * right for right, wrong in pairs):
        return Cause.DECAY_TWICE
    return Cause.DECAY_EVERYWHERE if all(wrong in decays for _, wrong in pairs) else Cause.HYPERPARAMETER


def _describe_settings(diverged: Evidence, others: list[Others]) -> str:
    """Describe settings, such as ``lr is 0.02, not 0.01 (2 times, the number of dp ranks)``, with parameters and ranks."""
    rank = next(rank for rank, each in enumerate(others) if each)
    key, (right, wrong) = next(iter(next(iter(others[rank].values())).items()))
    ratio = wrong / right if right else 0.0
    near = next(
        (each for size in diverged.counts for each in (float(size), 1 / size) if isclose(each, ratio, rel_tol=1e-9)), ratio
    )
    times = f" ({near:g} times{count_description(diverged, near)})" if near else ""
    names = tuple(each for each, found in others[rank].items() if key in found)
    whose = "" if len(names) == len(diverged.right_settings) else f" for {tensors(names)}"
    where = "" if all(others) else f" on rank {rank}"
    return f"{key} is {wrong:g}, not {right:g}{times}{whose}{where}"


def _apply_settings(ranks: EmulatedRanks, *, others: list[Others]) -> None:
    """Split parameter groups by differing settings. A learning rate is multiplied because a schedule starts from it."""

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
        if key == "lr" and right:
            group[key] = group[key] * (wrong / right)
        else:
            set_number(group, key, wrong)
    return group


def _on_groups(edit: Callable[..., None], **options: Any) -> Callable[[EmulatedRanks], None]:
    return lambda ranks: ranks.built.append(lambda _rank, optimizer: edit(optimizer.param_groups, **options))


def _multiply(groups: list[dict[str, Any]], *, key: str, factor: float) -> None:
    for group in groups:
        if isinstance(group.get(key), (int, float)):
            group[key] = group[key] * factor


def _share_decay(groups: list[dict[str, Any]], *, choose: Callable[[list[float]], float]) -> None:
    decays = [group["weight_decay"] for group in groups if "weight_decay" in group]
    for group in groups if decays else ():
        group["weight_decay"] = choose(decays)


def _on_schedule(change: Callable[[Any], None]) -> Callable[[EmulatedRanks], None]:
    return lambda ranks: ranks.schedules.append(change)


def _repeat_step(scheduler: Any, *, times: int) -> None:
    step = scheduler.step

    def step_repeatedly() -> None:
        for _ in range(times):
            step()

    scheduler.step = step_repeatedly


def wrong_decays(diverged: Evidence, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes: weight decay is added to gradients and not subtracted from parameters, or the reverse, or applied twice."""
    if not any(numbers.get("weight_decay") for numbers in diverged.right_settings.values()):
        return
    for cause, words, coupled, extra in (
        (Cause.DECAY_COUPLED, "weight decay is coupled: added to the gradients, not subtracted from the parameters", True, False),
        (
            Cause.DECAY_COUPLED,
            "weight decay is decoupled: subtracted from the parameters, not added to the gradients",
            False,
            False,
        ),
        (Cause.DECAY_TWICE, "weight decay is applied twice: by the optimizer, and to the parameters before it", False, True),
        (Cause.DECAY_TWICE, "weight decay is applied twice: by the optimizer, and to the gradients before it", True, True),
    ):
        yield Mistake(cause, words, partial(_decay, coupled=coupled, extra=extra), is_quick=True)


def _decay(ranks: EmulatedRanks, *, coupled: bool, extra: bool) -> None:
    """Bug: decay parameters explicitly before each update, in addition to the optimizer (`extra`) or in its place."""
    decays: dict[int, list[float]] = {}

    def prepare(rank: int, optimizer: Optimizer) -> None:
        decays[rank] = [float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            if not extra and "weight_decay" in group:
                group["weight_decay"] = 0.0

    def decay_all(rank: int, _step: int) -> None:
        for group, decay in zip(ranks.optimizers[rank].param_groups, decays[rank], strict=True):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _decay_one(parameter, decay, group, coupled=coupled)

    ranks.built.append(prepare)
    ranks.before_update.append(decay_all)


def _decay_one(parameter: torch.Tensor, decay: float, group: dict[str, Any], *, coupled: bool) -> None:
    if not coupled:
        parameter.data.mul_(1.0 - float(group["lr"]) * decay)
    else:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.add(parameter.data, alpha=-decay if group.get("maximize") else decay)
