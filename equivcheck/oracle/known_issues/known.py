"""Upstream issues on file: failures of torch itself that a check meets again and again."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from equivcheck.errors import EquivCheckError
from equivcheck.layouts.composition.fitting import fitted
from equivcheck.oracle.known_issues.predicates import NEEDS, SHOWS
from equivcheck.oracle.known_issues.showing import measured, version_range
from equivcheck.oracle.known_issues.workarounds import WITHOUT
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.scenario import Scenario
from equivcheck.system.choice import Choice
from equivcheck.system.torch_version import torch_in
from equivcheck.worlds.trace.differences import Difference, Divergence, Phase


class InvalidKnownIssue(EquivCheckError, ValueError):
    """An entry of known.toml does not describe an issue."""


class Kind(Choice):
    """What an upstream issue does."""

    WRONG_NUMBERS = "wrong_numbers"
    CRASH = "crash"
    HANG = "hang"
    LIMITATION = "limitation"


_OUTCOMES = {
    Kind.WRONG_NUMBERS: (Outcome.DIVERGED,),
    Kind.CRASH: (Outcome.CRASHED, Outcome.HUNG),
    Kind.HANG: (Outcome.HUNG,),
    Kind.LIMITATION: (Outcome.CRASHED, Outcome.HUNG),
}
"""How an issue of a kind can end a check; a rank that raises may leave the others waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownIssue:
    """One upstream issue, and how it is recognised."""

    id: str
    """Short, unique name, also of its script."""
    title: str
    """What torch does wrong, in one sentence without a full stop. The sentence says "silently" if nothing is raised."""
    link: str = ""
    """Where it is reported or documented. Empty if it is not reported."""
    torch: str
    """Versions of torch that have it, as a PEP 440 specifier."""
    kind: Kind
    """What it does."""
    layouts: tuple[str, ...]
    """Tags of parallelisms in which it shows; empty where no scenario gets there."""
    ranks: int = 2
    """Ranks that its script runs on."""
    needs: tuple[str, ...]
    """Names of predicates that the scenario must satisfy, all of them; see `NEEDS`."""
    error: str = ""
    """Of anything but wrong numbers: regular expression found in the verdict's reason or in what a rank raised."""
    phases: tuple[Phase, ...] = ()
    """Of wrong numbers: in which phases the first divergence may be; what comes before it in the step must then be right."""
    differences: tuple[Difference, ...] = ()
    """Of wrong numbers: in which ways the first tensor may differ."""
    shows: tuple[str, ...] = ()
    """Of wrong numbers: names of predicates that the first divergence must satisfy, all of them; see `SHOWS`."""
    without: str = ""
    """Name of a change by which the issue is avoided; see `WITHOUT`. Empty where no scenario within limits shows it."""
    tried_without: bool = False
    """Whether the evidence alone does not tell the issue: what the change leaves is run as well, and must not be wrong."""
    on_resume: bool = False
    """Whether it is what a checkpoint between two layouts holds: a wrong number then shows in the first step after it."""

    def __post_init__(self) -> None:
        wrong = self.kind is Kind.WRONG_NUMBERS
        has_first = bool(self.phases) and bool(self.differences)
        if has_first != (wrong and bool(self.layouts)) or wrong == bool(self.error):
            raise _refuse(
                self.id, f"of kind {self.kind.value} has the wrong evidence", ("phases and differences", "or else error")
            )
        avoided = (self.without,) if self.without else ()
        tables = (("needs", self.needs, NEEDS), ("shows", self.shows, SHOWS), ("without", avoided, WITHOUT))
        for field, names, table in tables:
            for name in names:
                if name not in table:
                    raise _refuse(self.id, f"{field} names {name!r}", sorted(table))

    @property
    def summary(self) -> str:
        """Title, and where the issue is reported."""
        return f"{self.title} ({self.link or 'not reported'})"

    def is_in(self, version: str) -> bool:
        """Whether it shows in a version of torch, such as ``2.13.0+cpu``; a nightly build counts as the release it leads to."""
        return SpecifierSet(self.torch).contains(Version(version).base_version)

    def explains(self, verdict: Verdict) -> bool:
        """Whether a failing verdict is this issue."""
        scenario = verdict.scenario
        return (
            verdict.outcome in _OUTCOMES[self.kind]
            and self._is_met(scenario)
            and (self._is_first(verdict.divergence, scenario) if verdict.divergence else self._is_raised(verdict))
        )

    def could_show(self, scenario: Scenario) -> bool:
        """Whether a scenario has what the issue needs, so that a check of it may end as this issue."""
        if scenario.resume is None:
            return not self.on_resume and self._is_met(scenario)
        return any(map(self._is_met, _of_one_layout(scenario)))

    def avoided(self, scenario: Scenario) -> Scenario | None:
        """The nearest scenario that can run and cannot show the issue; None if nobody knows one."""
        return fitted(WITHOUT[self.without](scenario)) if self.without else None

    def _is_met(self, scenario: Scenario) -> bool:
        """Whether a scenario of one layout has what the issue needs."""
        tags = {parallelism.tag for parallelism in scenario.layout.parallelisms}
        return not tags.isdisjoint(self.layouts) and all(NEEDS[name](scenario) for name in self.needs)

    def _is_first(self, divergence: Divergence, scenario: Scenario) -> bool:
        fits = divergence.phase in self.phases and divergence.difference in self.differences
        return fits and all(SHOWS[name](scenario, divergence) for name in self.shows)

    def _is_raised(self, verdict: Verdict) -> bool:
        errors = [report.error for report in verdict.failure.reports] if verdict.failure else []
        return any(re.search(self.error, error) for error in (verdict.reason, *errors))


def known_issue(verdict: Verdict) -> KnownIssue | None:
    """The issue on file that explains a failing verdict, if there is one."""
    views = {on_resume: tuple(_views(verdict, on_resume)) for on_resume in (False, True)}
    return next((issue for issue in known_issues() if any(map(issue.explains, views[issue.on_resume]))), None)


def _views(verdict: Verdict, on_resume: bool) -> Iterator[Verdict]:
    """The verdict as it would be of one layout alone, for each that may have caused it, by its checkpoint or without one."""
    resume = verdict.scenario.resume
    if resume is None:
        yield from () if on_resume else (verdict,)
        return
    of_first, of_second = (replace(verdict, scenario=scenario) for scenario in _of_one_layout(verdict.scenario))
    divergence = verdict.divergence
    if divergence is None or (on_resume and divergence.step == resume.steps):
        yield from (of_first, of_second)
    elif not on_resume and divergence.step < resume.steps:
        yield of_first
    elif not on_resume:
        yield replace(of_second, divergence=replace(divergence, step=divergence.step - resume.steps))  # they count anew


def _of_one_layout(scenario: Scenario) -> tuple[Scenario, ...]:
    """The scenario under each of its layouts alone, in the order in which they run."""
    return tuple(replace(scenario, layout=layout, resume=None) for layout in scenario.layouts)


@cache
def known_issues() -> tuple[KnownIssue, ...]:
    """The issues on file that apply to the installed torch. Raises `InvalidKnownIssue`."""
    return tuple(issue for issue in issues_on_file() if torch_in(issue.torch))


@cache
def issues_on_file() -> tuple[KnownIssue, ...]:
    """The issues on file, of every torch. Raises `InvalidKnownIssue`."""
    return read_issues(files("equivcheck.oracle.known_issues").joinpath("known.toml").read_text("utf-8"))


def read_issues(text: str) -> tuple[KnownIssue, ...]:
    """Every issue of a file such as known.toml. Raises `InvalidKnownIssue` for one that is not well-formed."""
    return tuple(_issue(row) for row in tomllib.loads(text)["issue"])


_CHOICES: dict[str, type[Choice]] = {"kind": Kind, "phases": Phase, "differences": Difference}


def _issue(row: dict[str, Any]) -> KnownIssue:
    known, name = {field.name for field in fields(KnownIssue)} - {"torch"}, str(row.get("id", "without id"))
    missing = {"id", "title", "kind", "layouts", "needs"} - set(row)
    if missing or set(row) - known:
        raise _refuse(name, f"lacks {sorted(missing)}, has the unknown {sorted(set(row) - known)}", sorted(known))
    for key, choice in _CHOICES.items():
        allowed = [member.value for member in choice]
        if key in row and not {*_listed(row[key])} <= {*allowed}:
            raise _refuse(name, f"{key} is {row[key]!r}", allowed)
    try:
        re.compile(row.get("error", ""))
    except re.error as error:
        raise _refuse(name, str(error), ("a regular expression in error",)) from error
    return KnownIssue(**{key: _read(key, value) for key, value in row.items()}, torch=version_range(measured().get(name, {})))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _read(key: str, value: Any) -> Any:
    choice = _CHOICES.get(key, lambda each: each)
    return tuple(map(choice, value)) if isinstance(value, list) else choice(value)


def _refuse(name: str, wrong: str, allowed: Iterable[str]) -> InvalidKnownIssue:
    return InvalidKnownIssue(f"known issue {name!r}: {wrong}; allowed: {', '.join(allowed)}")
