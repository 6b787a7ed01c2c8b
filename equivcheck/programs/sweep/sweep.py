"""Runs a sweep, and groups its failures by operation and by facts about their programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from equivcheck.oracle.verdict.description import shorten_to_line
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs.check import check_program
from equivcheck.programs.deadline import USUAL_DEADLINE, seconds_of_program
from equivcheck.programs.nouns import Operation, TensorProgram
from equivcheck.programs.run.facts import facts_of
from equivcheck.programs.verdict import ProgramVerdict


@dataclass(slots=True, kw_only=True)
class Group:
    """Programs in a sweep that fail in the same way at the same operation."""

    operation: str
    """Operation name."""
    outcome: Outcome
    """Outcome for each program, such as DIVERGED."""
    what: str
    """The first difference or error in a few words, or a known error's id."""
    first: ProgramVerdict
    """Verdict on the first program in the group."""
    facts: frozenset[str]
    """Facts about all programs in the group; see `facts_of`."""
    num: int = 0
    """How many programs the group has."""

    def add(self, found: frozenset[str]) -> None:
        """Count one more program in the group. The group keeps only the facts that are also in `found`, the program's facts."""
        self.num += 1
        self.facts &= found


@dataclass(slots=True, kw_only=True)
class SweepResult:
    """Counts and failures from a sweep."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    """How many programs had each outcome."""
    num_clones: int = 0
    """How many programs tested nothing, because their operation did not apply to its arguments."""
    refused: Counter[str] = field(default_factory=Counter)
    """For each operation, how many programs every rank refused with a clear error."""
    agreed: Counter[str] = field(default_factory=Counter)
    """For each operation, how many programs are equivalent without any refusal."""
    groups: dict[tuple[str, Outcome, str], Group] = field(default_factory=dict)
    """Failing programs, grouped by operation, outcome and error."""
    stopped: bool = False
    """Whether time ran out before all programs ran."""

    @property
    def num_findings(self) -> int:
        """How many groups have outcome DIVERGED, CRASHED or HUNG. Known errors are not counted."""
        return sum(group.outcome.is_finding for group in self.groups.values())

    def add(self, verdict: ProgramVerdict) -> None:
        """Count a program's outcome. If the outcome is a finding or a known error, also add the program to its group.

        A program with a statement that torch could not run tested nothing, so it is counted in `num_clones` only.
        """
        if verdict.clones:
            self.num_clones += 1
            return
        name = operation_of(verdict.program)
        self.outcomes[verdict.outcome] += 1
        if verdict.refusals:
            self.refused[name] += 1
        elif verdict.outcome is Outcome.EQUIVALENT:
            self.agreed[name] += 1
        if verdict.outcome.is_finding or verdict.known:
            self._group(name, verdict)

    def _group(self, name: str, verdict: ProgramVerdict) -> None:
        what, facts = failure_name(verdict), facts_of(verdict.program)
        new = Group(operation=name, outcome=verdict.outcome, what=what, first=verdict, facts=facts)
        self.groups.setdefault((name, verdict.outcome, what), new).add(facts)


def run_sweep(
    programs: Iterable[TensorProgram | None],
    *,
    world: str = "sim",
    is_over: Callable[[], bool] = lambda: False,
    only_sinks: bool = False,
) -> SweepResult:
    """Check a sweep's programs until all are done or `is_over` returns True. None among `programs` is skipped.

    If `only_sinks` is true, ranks read only the last values: those that no other statement takes as an argument.
    """
    found = SweepResult()
    for program in programs:
        if is_over():
            found.stopped = True
            break
        if program is None:
            continue
        deadline = seconds_of_program(program, world, USUAL_DEADLINE)
        found.add(check_program(program, world=world, deadline=deadline, only_sinks=only_sinks))
    return found


def operation_of(program: TensorProgram) -> str:
    """Return the name of a program's last operation."""
    return next(each.name for each in reversed(program.statements) if isinstance(each, Operation))


def failure_name(verdict: ProgramVerdict) -> str:
    """Describe a failure in a few words: the known error's id, the first difference's phase and kind, or the error."""
    if verdict.known:
        return verdict.known
    if verdict.divergence is not None:
        return f"{verdict.divergence.phase.value} {verdict.divergence.difference.value}"
    culprit = verdict.failure.culprit if verdict.failure else None
    return shorten_to_line(verdict.reason if culprit is None else culprit.error)
