"""One row of a matrix: a layout, and what was found."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.oracle.verdict.description import shortened
from equivcheck.oracle.verdict.sentences import place
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.user.traces.measures import Measures
from equivcheck.user.verdict import UserVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One layout, and what was found."""

    name: str
    """The layout's."""
    mesh: tuple[tuple[str, int], ...]
    """Names and sizes of its axes."""
    expected: Outcome
    """What should be found: EQUIVALENT, but for layouts that are wrong on purpose."""
    verdict: UserVerdict | None
    """What `check_training` says; None where it could not be asked."""
    error: str = ""
    """Why it could not, in a line; else empty."""
    milliseconds: float
    """CPU time of the check, of this process and those that it started; shown, never judged."""

    @property
    def is_as_expected(self) -> bool:
        """Whether it was checked, with the outcome that it should have."""
        return self.verdict is not None and self.verdict.outcome is self.expected

    @property
    def measures(self) -> Measures | None:
        """Its numbers; None where the ranks did not finish."""
        return None if self.verdict is None else self.verdict.measures

    @property
    def axes(self) -> str:
        """As ``dp 2 x tp 2``."""
        return " x ".join(f"{name} {size}" for name, size in self.mesh)

    @property
    def outcome(self) -> str:
        """In one word."""
        return "not checked" if self.verdict is None else self.verdict.outcome.value

    @property
    def first_difference(self) -> str:
        """Where ranks first differ from one device, or how they failed, or why nothing is known; empty where they agree."""
        if self.verdict is None:
            return shortened(self.error)
        if self.verdict.divergence is not None:
            return place(self.verdict.divergence)
        return shortened(self.verdict.reason)

    @property
    def cause(self) -> str:
        """Why, as far as it is known; else empty."""
        return "" if self.verdict is None else self.verdict.cause or self.verdict.hint

    @property
    def details(self) -> str:
        """All that is known, in a few lines."""
        return f"NOT CHECKED: {self.error}" if self.verdict is None else self.verdict.describe()
