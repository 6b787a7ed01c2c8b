"""Running a sweep, and what differs in it, grouped by operation and by what its programs have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from equivcheck.oracle.tensor_program import ProgramVerdict, check_program
from equivcheck.program_run.facts import facts_of
from equivcheck.tensor_program import Operation, TensorProgram
from equivcheck.verdict.verdict import Outcome


@dataclass(slots=True)
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
    num: int = 0
    """How many there are."""
    facts: frozenset[str] | None = None
    """What all of them have."""

    def add(self, verdict: ProgramVerdict) -> None:
        """Count one."""
        self.num += 1
        found = facts_of(verdict.program)
        self.facts = found if self.facts is None else self.facts & found


@dataclass(slots=True)
class Swept:
    """What a sweep came to."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    """Programs by outcome."""
    num_clones: int = 0
    """Programs whose operation did not apply: nothing was run."""
    refused: Counter[str] = field(default_factory=Counter)
    """Programs by operation that every rank refused."""
    agreed: Counter[str] = field(default_factory=Counter)
    """Programs by operation that agree, of which nothing was refused."""
    groups: dict[tuple[str, Outcome, str], Group] = field(default_factory=dict)
    """What differs."""

    def add(self, verdict: ProgramVerdict) -> None:
        """Count one."""
        name = operation_of(verdict.program)
        self.outcomes[verdict.outcome] += 1
        if verdict.refusals:
            self.refused[name] += 1
        elif verdict.outcome is Outcome.EQUIVALENT:
            self.agreed[name] += 1
        if verdict.outcome.is_finding:
            key = (name, verdict.outcome, what_of(verdict))
            self.groups.setdefault(key, Group(*key, first=verdict)).add(verdict)


def operation_of(program: TensorProgram) -> str:
    """The name of its last operation."""
    return next(each.name for each in reversed(program.statements) if isinstance(each, Operation))


def what_of(verdict: ProgramVerdict) -> str:
    """What differs, in few words: the phase and the way, or what was raised."""
    if verdict.divergence is not None:
        return f"{verdict.divergence.phase.value} {verdict.divergence.difference.value}"
    culprit = verdict.failure.culprit if verdict.failure else None
    text = culprit.error if culprit is not None else verdict.reason
    return " ".join(text.split())[:100]


def checked(programs: Iterable[TensorProgram], world: str = "sim") -> Iterator[ProgramVerdict]:
    """The verdict of each program whose operation applies."""
    for program in programs:
        verdict = check_program(program, world=world)
        if not verdict.clones:
            yield verdict
