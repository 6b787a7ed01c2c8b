"""A row in a matrix: one layout with its verdict."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.oracle.verdict.description import axes_in_words, shorten_to_line
from equivcheck.oracle.verdict.sentences import place
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.user.traces.measures import Measures
from equivcheck.user.verdict import UserVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRow:
    """A row in a matrix: one layout with its verdict."""

    name: str
    """Layout name."""
    mesh: tuple[tuple[str, int], ...]
    """Axis names and sizes."""
    expected: Outcome
    """Expected outcome; EQUIVALENT unless the layout is wrong on purpose."""
    verdict: UserVerdict | None
    """Verdict from `check_training`; None if `check_training` raised."""
    error: str = ""
    """If `check_training` raised: the exception in one line. Otherwise empty."""
    milliseconds: float
    """CPU time for the check, with child processes. It does not affect the outcome."""

    @property
    def is_as_expected(self) -> bool:
        """Whether the layout was checked and has its expected outcome."""
        return self.verdict is not None and self.verdict.outcome is self.expected

    @property
    def measures(self) -> Measures | None:
        """Loss, gradient norm and collective calls; None if the ranks did not finish."""
        return None if self.verdict is None else self.verdict.measures

    @property
    def axes(self) -> str:
        """Mesh axes with their sizes as text: ``dp 2 x tp 2``."""
        return axes_in_words(self.mesh)

    @property
    def outcome(self) -> str:
        """The outcome in one word, or ``not checked``."""
        return "not checked" if self.verdict is None else self.verdict.outcome.value

    @property
    def first_difference(self) -> str:
        """Text about the first difference between ranks and one device, or about failed ranks; empty if they agree."""
        if self.verdict is None:
            return shorten_to_line(self.error)
        if self.verdict.divergence is not None:
            return place(self.verdict.divergence)
        return shorten_to_line(self.verdict.reason)

    @property
    def cause(self) -> str:
        """The cause, or a hint if no cause is known; empty if there is neither."""
        return "" if self.verdict is None else self.verdict.cause or self.verdict.hint

    @property
    def details(self) -> str:
        """The verdict's full text, with stacks if ranks failed, or the error."""
        return f"NOT CHECKED: {self.error}" if self.verdict is None else self.verdict.describe(verbose=True)
