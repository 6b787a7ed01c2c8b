"""Compares environments and optimizer settings. They may explain a difference, but do not decide the outcome."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from equivcheck.recording.compare.runs import RecordedRun

IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Settings without an effect on results, except for rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherSetting:
    """An optimizer or clipping setting whose value differs in run B."""

    step: int
    """First step at which the values differ."""
    name: str
    """Name, such as ``lr``."""
    values: tuple[str, str]
    """Value in run A and value in run B."""

    @property
    def may_explain(self) -> bool:
        """Whether this setting changes the values that an optimizer computes."""
        return self.name not in IMPLEMENTATION

    def __str__(self) -> str:
        return f"{self.name} is {self.values[1]} in B, {self.values[0]} in A"


def other_settings(first: RecordedRun, second: RecordedRun, steps: list[int]) -> list[OtherSetting]:
    """Return the optimizer and clipping settings that differ in run B, each at its first step."""
    found: dict[str, OtherSetting] = {}
    for step in steps:
        one, other = parameter_groups(first, step), parameter_groups(second, step)
        names = dict.fromkeys(name for groups in (one, other) for group in groups for name in group)
        for name in names if one and other and _as_set(one) != _as_set(other) else ():
            values = [tuple(sorted({group.get(name, "not set") for group in groups})) for groups in (one, other)]
            if values[0] != values[1] and name not in found:
                found[name] = OtherSetting(step=step, name=name, values=(" and ".join(values[0]), " and ".join(values[1])))
        limits = [_limits(run, step) for run in (first, second)]
        if all(limits) and limits[0] != limits[1] and "max_norm" not in found:
            found["max_norm"] = OtherSetting(step=step, name="max_norm", values=(limits[0], limits[1]))
    return list(found.values())


def parameter_groups(run: RecordedRun, step: int) -> list[dict[str, str]]:
    """Return the settings of each parameter group in a step. Equal groups on several ranks count once."""
    groups = [dict(group) for record in run.records[step] for group in record.settings]
    return [group for at, group in enumerate(groups) if group not in groups[:at]]


def _as_set(groups: list[dict[str, str]]) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(group.items()) for group in groups}


def _limits(run: RecordedRun, step: int) -> str:
    limits = {(clip.max_norm, clip.norm_type) for record in run.records[step] for clip in record.clips}
    return " and ".join(f"{most:g} of the {kind:g}-norm" for most, kind in sorted(limits))


def other_environment(first: RecordedRun, second: RecordedRun) -> Iterator[str]:
    """Yield clauses about differences between environments, such as another version of torch."""
    environments = [run.ranks[0].header.environment for run in (first, second)]
    for name in sorted({*environments[0], *environments[1]}):
        one, other = (environment.get(name, "not set") for environment in environments)
        if one != other:
            yield f"{name} is {other} in B, {one} in A"
