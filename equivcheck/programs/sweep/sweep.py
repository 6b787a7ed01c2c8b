"""Runs a sweep, and groups differences by operation and by facts shared by their programs."""

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
    """Programs that fail in the same way at the same operation."""

    operation: str
    """Operation name."""
    outcome: Outcome
    """Outcome of the programs."""
    what: str
    """First difference or error."""
    first: ProgramVerdict
    """Verdict on the first program."""
    facts: frozenset[str]
    """Facts shared by all programs."""
    num: int = 0
    """Number of programs."""

    def add(self, found: frozenset[str]) -> None:
        """Count a program with these facts."""
        self.num += 1
        self.facts &= found


@dataclass(slots=True, kw_only=True)
class SweepResult:
    """Sweep result."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    """Programs by outcome."""
    num_clones: int = 0
    """Number of programs whose operation did not apply."""
    refused: Counter[str] = field(default_factory=Counter)
    """Programs that every rank refused, by operation."""
    agreed: Counter[str] = field(default_factory=Counter)
    """Programs that agree without any refusal, by operation."""
    groups: dict[tuple[str, Outcome, str], Group] = field(default_factory=dict)
    """Failures, grouped."""
    stopped: bool = False
    """Whether time ran out before all programs ran."""

    @property
    def num_findings(self) -> int:
        """Count groups not explained by a known issue."""
        return sum(group.outcome.is_finding for group in self.groups.values())

    def add(self, verdict: ProgramVerdict) -> None:
        """Count a verdict."""
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
    """Run programs until all are done or `is_over` returns True. None stands for a pair without a program.

    With `only_sinks`, ranks read no value before the statements taking it, as in `check_program`.
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
    """Return the name of the last operation."""
    return next(each.name for each in reversed(program.statements) if isinstance(each, Operation))


def failure_name(verdict: ProgramVerdict) -> str:
    """Describe the first difference in a few words: phase and difference, or the error."""
    if verdict.known:
        return verdict.known
    if verdict.divergence is not None:
        return f"{verdict.divergence.phase.value} {verdict.divergence.difference.value}"
    culprit = verdict.failure.culprit if verdict.failure else None
    return shorten_to_line(verdict.reason if culprit is None else culprit.error)
