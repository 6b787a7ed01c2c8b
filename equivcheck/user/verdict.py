"""The outcome of `check_training`, with its evidence."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.oracle.verdict.cause import Cause
from equivcheck.oracle.verdict.description import of_divergence, of_ranks
from equivcheck.oracle.verdict.verdict import Judgement
from equivcheck.user.traces.measures import Measures
from equivcheck.worlds.failure import Failure, RankState


@dataclass(frozen=True, slots=True, kw_only=True)
class UserVerdict(Judgement):
    """What `check_training` returns: EQUIVALENT, DIVERGED, CRASHED, HUNG or INCONCLUSIVE."""

    mesh: tuple[tuple[str, int], ...]
    """Names and sizes of the axes."""
    precision: str
    """The coarsest element type that the training passes through on one device: tolerances are measured in its units. With
    `precision` what it computes in, and what is rounded to."""
    cause: str = ""
    """Why it diverged: what, done wrong on one device, leaves all that the ranks left; empty where nothing known does."""
    kinds: tuple[Cause, ...] = ()
    """What `cause` is, in a word; several where either may be."""
    where: str = ""
    """The first module whose output, or gradient of its output, differs; empty where that was not looked for, or not found."""
    types: str = ""
    """What the type checker of spmd_types says, where parameters have its types and ranks diverged or failed; else empty."""
    hint: str = ""
    """What may explain a divergence without a known cause, in a sentence; empty where nothing is known."""
    unread: tuple[str, ...] = ()
    """Optimizer state that no rank could hand over, and that was not compared."""
    notes: tuple[str, ...] = ()
    """What is worth knowing of how the ranks ran, and what that cannot show, a sentence each."""
    measures: Measures | None = None
    """Loss and gradient norm of the first step, calls and bytes of a step; None where the ranks did not finish."""

    def describe(self) -> str:
        """A few lines for people."""
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh)
        heading = f"{self.outcome.value.upper()}: a training of yours on {axes}, {self.precision}, in {self.world}"
        return "\n".join([heading, *(f"  {line}" for line in self._evidence())])

    def _evidence(self) -> list[str]:
        lines = [self._in_short()]
        if self.divergence is not None:
            lines = of_divergence(self.divergence, self.followers, self.num_unnamed)
        elif self.failure is not None:
            lines = [*of_ranks(self.failure), *_frames(self.failure)]
        if self.cause or self.hint:
            lines.append(f"why:   {self.cause or self.hint}")
        if self.where:
            lines.append(f"where: {self.where}")
        if self.types:
            lines.append(f"types: {self.types}")
        if self.unread:
            lines.append(f"not compared, as no rank could read it: {', '.join(self.unread)}")
        return [*lines, *(f"note:  {note}" for note in self.notes)]


FRAMES = 8
"""Last lines that `describe` shows of a traceback."""


def _frames(failure: Failure) -> list[str]:
    """The end of the stack of the first rank that raised, or else that runs, without lines that underline parts of others."""
    for state in (RankState.RAISED, RankState.RUNNING):
        for report in failure.reports:
            if report.state is state and report.stack:
                lines = [f"  {line}" for line in report.stack.rstrip().splitlines() if line.strip(" ^~")][-FRAMES:]
                return lines if state is RankState.RAISED else [f"rank {report.rank} runs in", *lines]
    return []
