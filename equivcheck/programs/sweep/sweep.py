"""Running a sweep, and what differs in it, grouped by operation and by what its programs have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from equivcheck.oracle.verdict.description import shortened
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs.check import check_program
from equivcheck.programs.deadline import USUAL_DEADLINE, seconds_of_program
from equivcheck.programs.nouns import Operation, TensorProgram
from equivcheck.programs.run.facts import facts_of
from equivcheck.programs.verdict import ProgramVerdict


@dataclass(slots=True, kw_only=True)
class Group:
    """Programs of one operation that end alike."""

    operation: str
    """Its name."""
    outcome: Outcome
    """How they end."""
    what: str
    """What differs, or what was raised."""
    first: ProgramVerdict
    """That of the first of them."""
    facts: frozenset[str]
    """What all of them have."""
    num: int = 0
    """How many there are."""

    def add(self, found: frozenset[str]) -> None:
        """Count one that has these facts."""
        self.num += 1
        self.facts &= found


@dataclass(slots=True, kw_only=True)
class Swept:
    """What a sweep came to."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    """Programs by outcome."""
    num_clones: int = 0
    """Programs whose operation did not apply."""
    refused: Counter[str] = field(default_factory=Counter)
    """Programs that every rank refused, by operation."""
    agreed: Counter[str] = field(default_factory=Counter)
    """Programs that agree, of which nothing was refused, by operation."""
    groups: dict[tuple[str, Outcome, str], Group] = field(default_factory=dict)
    """What differs."""
    stopped: bool = False
    """Whether the time was over before all were run."""

    @property
    def num_findings(self) -> int:
        """Groups of what is on no file."""
        return sum(group.outcome.is_finding for group in self.groups.values())

    def add(self, verdict: ProgramVerdict) -> None:
        """Count one."""
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
        what, facts = what_of(verdict), facts_of(verdict.program)
        new = Group(operation=name, outcome=verdict.outcome, what=what, first=verdict, facts=facts)
        self.groups.setdefault((name, verdict.outcome, what), new).add(facts)


def swept(
    programs: Iterable[TensorProgram | None],
    *,
    world: str = "sim",
    is_over: Callable[[], bool] = lambda: False,
    only_sinks: bool = False,
) -> Swept:
    """Run programs: all of them, or those that were run before it `is_over`. None is a place without a program.

    With `only_sinks`, nothing that a statement takes is read before, as in `check_program`.
    """
    found = Swept()
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
    """The name of its last operation."""
    return next(each.name for each in reversed(program.statements) if isinstance(each, Operation))


def what_of(verdict: ProgramVerdict) -> str:
    """What differs, in few words: the phase and the way, or what was raised."""
    if verdict.known:
        return verdict.known
    if verdict.divergence is not None:
        return f"{verdict.divergence.phase.value} {verdict.divergence.difference.value}"
    culprit = verdict.failure.culprit if verdict.failure else None
    return shortened(verdict.reason if culprit is None else culprit.error)
