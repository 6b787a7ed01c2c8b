"""What DTensor is known to get wrong in tensor programs, told by operation and facts, so that one entry excludes few programs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from equivcheck.oracle.verdict.verdict import Judgement
from equivcheck.programs.nouns.program import TensorProgram
from equivcheck.programs.nouns.statements import Operation
from equivcheck.programs.run.facts import facts_of
from equivcheck.system.torch_version import torch_in
from equivcheck.worlds.failure import Failure
from equivcheck.worlds.trace.differences import Phase

BACKWARD = re.compile(r"(^|StatementFailed: )backward: ")
"""What is raised, or waited for, in the backward pass names no operation."""
FRAME = re.compile(r"^  File .*", re.MULTILINE)
"""A line of a stack that says which function it is in."""
OPERATION = re.compile(r'^  File "<operation .*', re.MULTILINE)
"""That of the function that an operation is."""
SHOWING = ("wrong", "raises", "hangs")
"""What a version that shows an entry made of its program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDifference:
    """One cause of wrong values, or of an error that does not say what is not supported."""

    id: str
    """Short name, unique."""
    link: str
    """Where it is reported, or that no report was found, and the sentence that describes it."""
    torch: str
    """Version range in which it was seen, as a PEP 440 specifier."""
    shows: Mapping[str, str]
    """By version of torch, oldest first, what its program came to over gloo: one of `SHOWING`, or of what shows nothing: right,
    refused, or wrong or raises otherwise."""
    operations: tuple[str, ...] = ()
    """Operations in which it shows, or kinds of statements such as a round trip; empty if the evidence tells it in any."""
    facts: frozenset[str] = frozenset()
    """What a program must have beside one of them; see `facts_of`."""
    any_of: frozenset[str] = frozenset()
    """Facts of which it must have one; empty where it need not."""
    phases: tuple[Phase, ...] = ()
    """Where values differ first; empty where none do."""
    raises: str = ""
    """A regular expression found in what a rank raises, or in the stack of one that never ends; empty where none does."""

    def could_show(self, program: TensorProgram) -> bool:
        """Whether a program has all that it needs, on the installed torch."""
        names = {each.name if isinstance(each, Operation) else each.tag for each in program.statements}
        if (self.operations and names.isdisjoint(self.operations)) or not torch_in(self.torch):
            return False
        found = facts_of(program)
        return self.facts <= found and not (self.any_of and self.any_of.isdisjoint(found))

    def explains(self, program: TensorProgram, verdict: Judgement) -> bool:
        """Whether what is wrong first is this: in one of the operations, or where gradients flow into it."""
        if verdict.divergence is not None:
            phase, tensor = verdict.divergence.phase, verdict.divergence.tensor
            is_it = phase in self.phases and self._named_in(tensor.partition(" ")[2])
        else:
            is_it = bool(self.raises) and verdict.failure is not None and self._is_raised(verdict.failure)
        return is_it and self.could_show(program)

    def seen_on(self) -> tuple[str, ...]:
        """The versions that show it."""
        return tuple(version for version, found in self.shows.items() if found in SHOWING)

    def unseen_on(self) -> tuple[str, ...]:
        """The versions that were tried and do not: they are right, refuse it, or fail in another way."""
        return tuple(version for version, found in self.shows.items() if found not in SHOWING)

    def _is_raised(self, failure: Failure) -> bool:
        """Whether it is what ranks raised, or where those are that run; where all wait, for what."""
        active = [each for each in failure.reports if not each.pending]
        found = "\n".join("\n".join((each.error, *FRAME.findall(each.stack))) for each in active) or failure.summary
        told = "\n".join(each.error or "\n".join(OPERATION.findall(each.stack)) for each in active) or failure.summary
        return re.search(self.raises, found) is not None and bool(BACKWARD.search(told) or self._named_in(told))

    def _named_in(self, text: str) -> bool:
        """Whether one of the operations is a word of a text."""
        return not self.operations or not {*re.findall(r"\w+", text)}.isdisjoint(self.operations)
