"""Compares two recorded runs side by side: samples, settings and environments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from equivcheck.recording.compare.compare import Comparison
from equivcheck.recording.compare.runs import RecordedRun
from equivcheck.recording.trace import RankTrace

_ABSENT = "not set"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """One value in two recorded runs, side by side."""

    name: str
    """The value's name."""
    first: str
    """Value in the first run."""
    second: str
    """Value in the second run."""

    @property
    def differs(self) -> bool:
        """Whether the value differs between the runs."""
        return self.first != self.second


def settings_rows(compared: Comparison) -> Iterator[Sides]:
    """Yield the optimizer settings at the first step in both runs, and later settings that differ."""
    shared = compared.facts.steps
    for step in shared:
        first, second = (_settings(run, step) for run in compared.facts.runs)
        for row in _sides(first, second):
            if step == shared[0] or row.differs:
                yield row


def _settings(run: RecordedRun, step: int) -> dict[str, str]:
    """Settings by step, group and name, on rank 0."""
    groups = run.records[step][0].settings
    return {f"step {step}, group {at}, {name}": value for at, group in enumerate(groups) for name, value in group.items()}


def environment_rows(compared: Comparison) -> Iterator[Sides]:
    """Yield both runs' command, how many ranks they have, and rank 0's environment."""
    first, second = (_facts(run.ranks[0]) for run in compared.facts.runs)
    yield from _sides(first, second)


def _facts(rank: RankTrace) -> dict[str, str]:
    header = rank.header
    return {"command": " ".join(header.argv), "ranks": str(header.num_ranks), **header.environment}


def _sides(first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[Sides]:
    for name in dict.fromkeys([*first, *second]):
        yield Sides(name=name, first=first.get(name, _ABSENT), second=second.get(name, _ABSENT))
