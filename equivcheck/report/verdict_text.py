"""A verdict in color."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome

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
    """Print outcome, case and evidence; for a finding also the case as code."""
    title = Text.assemble((verdict.outcome.value.upper(), f"bold {STYLES[verdict.outcome]}"), f": {verdict.heading()}")
    title.append(f", {verdict.seconds * 1000:.0f} ms")
    console.print(title, soft_wrap=True)
    for line in verdict.evidence():
        console.print(Text(f"  {line}"), soft_wrap=True)
    if verdict.outcome.is_finding:
        console.print(Text(verdict.code()), soft_wrap=True)
