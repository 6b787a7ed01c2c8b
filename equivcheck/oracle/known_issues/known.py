"""The list of known issues in torch, read from known.toml."""

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
from equivcheck.layouts.composition.fitting import fit_scenario
from equivcheck.layouts.composition.limits import MAX_REPAIRS
from equivcheck.oracle.known_issues.predicates import NEEDS, SHOWS
from equivcheck.oracle.known_issues.showing import measured_results, version_range
from equivcheck.oracle.known_issues.workarounds import WORKAROUNDS
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.scenario import Scenario
from equivcheck.system.choice import PrintableEnum
from equivcheck.system.torch_version import is_torch_in
from equivcheck.worlds.trace.differences import Difference, Divergence, Phase


class InvalidKnownIssue(EquivCheckError, ValueError):
    """An entry in known.toml is not valid."""


class IssueKind(PrintableEnum):
    """How a known issue of torch shows in a training."""

    WRONG_NUMBERS = "wrong_numbers"
    CRASH = "crash"
    HANG = "hang"
    LIMITATION = "limitation"


_OUTCOMES = {
    IssueKind.WRONG_NUMBERS: (Outcome.DIVERGED,),
    IssueKind.CRASH: (Outcome.CRASHED, Outcome.HUNG),
    IssueKind.HANG: (Outcome.HUNG,),
    IssueKind.LIMITATION: (Outcome.CRASHED, Outcome.HUNG),
}
"""Outcomes that a kind of issue can cause. If one rank raises, other ranks may hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownIssue:
    """A known issue of torch, and how to recognise a failed check that it causes."""

    id: str
    """Short unique name. Its script has the same name."""
    title: str
    """Sentence about torch's error, without a full stop. It contains "silently" if torch raises nothing."""
    link: str = ""
    """URL for the report or the documentation. Empty if the issue is not reported."""
    torch: str
    """Versions of torch with the issue, as a PEP 440 specifier."""
    kind: IssueKind
    """How the issue shows: wrong numbers, a crash, a hang or a limitation."""
    layouts: tuple[str, ...]
    """Tags of parallelisms that can show the issue. Empty if no scenario can."""
    ranks: int = 2
    """Number of ranks that the issue's script needs."""
    needs: tuple[str, ...]
    """Names of predicates in `NEEDS`. A scenario must meet all of them to show the issue."""
    error: str = ""
    """Regular expression that must match the verdict's reason or a rank's error. Empty for wrong numbers."""
    phases: tuple[Phase, ...] = ()
    """Phases in which the first divergence may lie. Empty unless the issue gives wrong numbers."""
    differences: tuple[Difference, ...] = ()
    """Kinds of difference that the first divergence may have. Empty unless the issue gives wrong numbers."""
    shows: tuple[str, ...] = ()
    """Names of predicates in `SHOWS`. The first divergence must meet all of them."""
    without: str = ""
    """Name of a function in `WORKAROUNDS` that avoids the issue. Empty if no workaround is known."""
    tried_without: bool = False
    """Whether the evidence alone is ambiguous. The scenario then also runs with the workaround, and must be equivalent."""
    on_resume: bool = False
    """Whether the issue comes from a checkpoint between two layouts. Wrong numbers then show in the first step after the
    checkpoint.
    """

    def __post_init__(self) -> None:
        wrong = self.kind is IssueKind.WRONG_NUMBERS
        has_first = bool(self.phases) and bool(self.differences)
        if has_first != (wrong and bool(self.layouts)) or wrong == bool(self.error):
            raise _refuse(
                self.id,
                f"the evidence does not fit the kind {self.kind.value}",
                ("phases and differences if wrong numbers occur in layouts", "or error for other kinds"),
            )
        avoided = (self.without,) if self.without else ()
        tables = (("needs", self.needs, NEEDS), ("shows", self.shows, SHOWS), ("without", avoided, WORKAROUNDS))
        for field, names, table in tables:
            for name in names:
                if name not in table:
                    raise _refuse(self.id, f"{field} has the unknown name {name!r}", sorted(table))

    @property
    def summary(self) -> str:
        """Title and link of the issue, as one line."""
        return f"{self.title} ({self.link or 'not reported'})"

    def is_in(self, version: str) -> bool:
        """Whether a version of torch, such as ``2.13.0+cpu``, has the issue. A nightly build counts as the next release."""
        return SpecifierSet(self.torch).contains(Version(version).base_version)

    def explains(self, verdict: Verdict) -> bool:
        """Whether the issue explains a verdict with outcome DIVERGED, CRASHED or HUNG."""
        scenario = verdict.scenario
        return (
            verdict.outcome in _OUTCOMES[self.kind]
            and self._is_met(scenario)
            and (self._is_first(verdict.divergence, scenario) if verdict.divergence else self._is_raised(verdict))
        )

    def could_show(self, scenario: Scenario) -> bool:
        """Whether this scenario's check can fail because of the issue: the scenario meets all `needs`."""
        if scenario.resume is None:
            return not self.on_resume and self._is_met(scenario)
        return any(map(self._is_met, _of_one_layout(scenario)))

    def avoid(self, scenario: Scenario) -> Scenario | None:
        """Apply the issue's workaround, then repair the scenario until no limit applies.

        None if there is no workaround, or if the repair fails.
        """
        return fit_scenario(WORKAROUNDS[self.without](scenario)) if self.without else None

    def _is_met(self, scenario: Scenario) -> bool:
        tags = {parallelism.tag for parallelism in scenario.layout.parallelisms}
        return not tags.isdisjoint(self.layouts) and all(NEEDS[name](scenario) for name in self.needs)

    def _is_first(self, divergence: Divergence, scenario: Scenario) -> bool:
        fits = divergence.phase in self.phases and divergence.difference in self.differences
        return fits and all(SHOWS[name](scenario, divergence) for name in self.shows)

    def _is_raised(self, verdict: Verdict) -> bool:
        errors = [report.error for report in verdict.failure.reports] if verdict.failure else []
        return any(re.search(self.error, error) for error in (verdict.reason, *errors))


def known_issue(verdict: Verdict) -> KnownIssue | None:
    """Return the known issue that explains a failing verdict; None if no issue does."""
    # A checkpoint between two layouts can show an issue of either layout, or of the checkpoint itself.
    views = {on_resume: tuple(_views(verdict, on_resume)) for on_resume in (False, True)}
    return next((issue for issue in known_issues() if any(map(issue.explains, views[issue.on_resume]))), None)


def _views(verdict: Verdict, on_resume: bool) -> Iterator[Verdict]:
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
        yield replace(of_second, divergence=replace(divergence, step=divergence.step - resume.steps))  # steps count from 0


def _of_one_layout(scenario: Scenario) -> tuple[Scenario, ...]:
    return tuple(replace(scenario, layout=layout, resume=None) for layout in scenario.layouts)


def could_show(scenario: Scenario) -> tuple[KnownIssue, ...]:
    """Return the known issues in the installed torch that can make this scenario's check fail."""
    return tuple(issue for issue in known_issues() if issue.could_show(scenario))


def without_known_issues(scenario: Scenario) -> Scenario | None:
    """Apply workarounds until the scenario can show no known issue. None if no such scenario is found."""
    found: Scenario | None = scenario
    for _ in range(MAX_REPAIRS):
        issues = could_show(found) if found is not None else ()
        if found is None or not issues:
            return found
        found = issues[0].avoid(found)
    return None


@cache
def known_issues() -> tuple[KnownIssue, ...]:
    """Return the known issues that the installed torch has. Raises `InvalidKnownIssue` if known.toml is not valid."""
    return tuple(issue for issue in all_known_issues() if is_torch_in(issue.torch))


@cache
def all_known_issues() -> tuple[KnownIssue, ...]:
    """Return the known issues in all torch versions. Raises `InvalidKnownIssue` if known.toml is not valid."""
    return read_issues(files("equivcheck.oracle.known_issues").joinpath("known.toml").read_text("utf-8"))


def read_issues(text: str) -> tuple[KnownIssue, ...]:
    """Return the known issues in a text with the format of known.toml. Raises `InvalidKnownIssue` if an entry is not valid."""
    return tuple(_issue(row) for row in tomllib.loads(text)["issue"])


_CHOICES: dict[str, type[PrintableEnum]] = {"kind": IssueKind, "phases": Phase, "differences": Difference}


def _issue(row: dict[str, Any]) -> KnownIssue:
    known, name = {field.name for field in fields(KnownIssue)} - {"torch"}, str(row.get("id", "without id"))
    missing = {"id", "title", "kind", "layouts", "needs"} - set(row)
    if missing or set(row) - known:
        raise _refuse(name, f"missing keys {sorted(missing)}, unknown keys {sorted(set(row) - known)}", sorted(known))
    for key, choice in _CHOICES.items():
        allowed = [member.value for member in choice]
        if key in row and not {*_listed(row[key])} <= {*allowed}:
            raise _refuse(name, f"{key} is {row[key]!r}", allowed)
    try:
        re.compile(row.get("error", ""))
    except re.error as error:
        raise _refuse(name, str(error), ("a regular expression in error",)) from error
    return KnownIssue(
        **{key: _read(key, value) for key, value in row.items()}, torch=version_range(measured_results().get(name, {}))
    )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _read(key: str, value: Any) -> Any:
    choice = _CHOICES.get(key, lambda each: each)
    return tuple(map(choice, value)) if isinstance(value, list) else choice(value)


def _refuse(name: str, wrong: str, allowed: Iterable[str]) -> InvalidKnownIssue:
    return InvalidKnownIssue(f"known issue {name!r} is not valid: {wrong}. Expected {', '.join(allowed)}.")
