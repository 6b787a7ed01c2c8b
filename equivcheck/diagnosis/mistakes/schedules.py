"""Mistakes in optimizer settings at single steps, for example because a schedule advances too often."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import isclose
from typing import Any

from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks
from equivcheck.diagnosis.emulation.turns import NotTogether
from equivcheck.diagnosis.evidence import Evidence
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.diagnosis.words import count_description, name_ranks, tensors
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.training.update.settings import FLAGS, Settings, set_number

NEAR = 1e-14
"""Relative difference below which settings count as equal. It is small because settings are not computed by sums."""
Steps = tuple[Settings, ...]
"""Settings at each step's update."""


def _are_equal(one: float, other: float) -> bool:
    """Whether two settings are equal, except for their last digit."""
    return isclose(one, other, rel_tol=NEAR)


def equal_settings(diverged: Evidence) -> set[str]:
    """Return the names of settings with the right values on all ranks at each update. Right values are those on one device.

    Returns an empty set if settings cannot be read.
    """
    single, runs = diverged.right_settings_at_steps, diverged.settings_at_steps
    if not runs or not all(len(steps) == len(single) and all(steps) for steps in runs):
        return set()
    keys = {key for settings in single for numbers in settings.values() for key in numbers}
    return keys - {key for steps in runs for _, _, key in differing_settings(single, steps)}


def settings_at_steps(diverged: Evidence) -> Iterator[Mistake]:
    """Yield a mistake: ranks have other optimizer settings than one device.

    To reproduce it, emulated ranks get the real ranks' settings at each update.
    """
    single, runs = diverged.right_settings_at_steps, diverged.settings_at_steps
    wrong = {rank: found for rank, steps in enumerate(runs) if (found := differing_settings(single, steps))}
    if not wrong:
        return
    rank = next(iter(wrong))
    step, _, key = wrong[rank][0]
    names = [name for at, name, other in wrong[rank] if (at, other) == (step, key)]
    expected, actual = ([numbers.get(names[0], {}).get(key) for numbers in steps] for steps in (single, runs[rank]))
    schedule = describe_schedule(expected, actual, partial(count_description, diverged))
    whose = "" if len(names) == len(single[step]) else f" for {tensors(names)}"
    where = "" if len(wrong) == len(runs) else f" on {name_ranks(list(wrong))}"
    wrong_value, right_value = (bool(each[step]) if key in FLAGS else f"{each[step]:g}" for each in (actual, expected))
    words = f"at step {step}, {key} is {wrong_value}, not {right_value}{whose}{where}{schedule and ': '}{schedule}"
    cause, same = Cause.SCHEDULE if schedule else Cause.HYPERPARAMETER, all(steps == runs[0] for steps in runs)
    cause = Cause.DECAY_COUPLED if key == "decoupled_weight_decay" else cause
    yield Mistake(cause, words, partial(_set_at_steps, runs=runs), is_quick=same)


def differing_settings(single: Steps, steps: Steps) -> list[tuple[int, str, str]]:
    """Return step, parameter and setting for each difference between `steps` and the single-device run's settings, `single`."""
    return [
        (step, name, key)
        for step, (expected, actual) in enumerate(zip(single, steps, strict=False))
        for name, numbers in actual.items()
        for key, value in numbers.items()
        if key in expected.get(name, {}) and not _are_equal(expected[name][key], value)
    ]


def describe_schedule(expected: Sequence[Any], actual: Sequence[Any], describe_count: Callable[[float], str]) -> str:
    """Describe a schedule with the right values at wrong steps, such as one step late. Empty for other schedules.

    `describe_count` gets a number, and returns a clause about its meaning, or an empty text.
    """
    count = len(expected)
    if None in expected or None in actual or len({*expected}) == 1:
        return ""
    if all(value == expected[0] for value in actual):
        return "the schedule never advances"
    for times in range(2, count):
        if all(_are_equal(actual[step], expected[step * times]) for step in range(count) if step * times < count):
            return f"the schedule advances {times} times per step{describe_count(times)}"
    for ahead in (1, -1):
        pairs = [(actual[step], expected[step + ahead]) for step in range(count) if 0 <= step + ahead < count]
        if all(_are_equal(*pair) for pair in pairs) and len({right for _, right in pairs}) > 1:
            return f"the schedule is one step {'ahead' if ahead > 0 else 'behind'}"
    return ""


def _set_at_steps(ranks: EmulatedRanks, *, runs: tuple[Steps, ...]) -> None:
    def set_all(rank: int, step: int) -> None:
        names = {id(value): name for name, value in ranks.parameters[rank].items()}
        for group in ranks.groups(rank):
            held = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
            found = [next(each[step][name] for each in (runs[rank], *runs) if name in each[step]) for name in held]
            if any(each != found[0] for each in found):
                raise NotTogether(
                    "the optimizer's parameter groups differ between ranks. Expected the same groups on every rank."
                )
            for key, value in found[0].items() if found else ():
                set_number(group, key, value)

    ranks.before_update.append(set_all)
