"""Prints a verdict in color."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome
from equivcheck.system.printable import wrap_lines

STYLES = {
    Outcome.EQUIVALENT: "green",
    Outcome.DIVERGED: "red",
    Outcome.CRASHED: "red",
    Outcome.HUNG: "red",
    Outcome.KNOWN: "yellow",
    Outcome.INCONCLUSIVE: "yellow",
    Outcome.UNSUPPORTED: "dim",
}
"""Color per outcome."""


def print_verdict(console: Console, verdict: CaseVerdict) -> None:
    """Print a verdict's outcome, case and evidence. For a finding, also print the case as code."""
    outcome = verdict.outcome.value.upper()
    heading = f"{outcome}: {verdict.heading()}, {verdict.seconds * 1000:.0f} ms"
    text = Text("\n".join(wrap_lines([heading, *(f"  {line}" for line in verdict.evidence())])))
    text.stylize(f"bold {STYLES[verdict.outcome]}", 0, len(outcome))
    console.print(text, soft_wrap=True)
    if verdict.outcome.is_finding:
        console.print(Text(verdict.code()), soft_wrap=True)
