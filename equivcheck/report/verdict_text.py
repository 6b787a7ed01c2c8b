"""One verdict, for people: the lines that every face has, with colour."""

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
"""How an outcome is coloured where there is colour."""


def print_verdict(console: Console, verdict: CaseVerdict) -> None:
    """Outcome, case in words, evidence; of something new and wrong also the case as code."""
    title = Text.assemble((verdict.outcome.value.upper(), f"bold {STYLES[verdict.outcome]}"), f": {verdict.heading()}")
    title.append(f", {verdict.seconds * 1000:.0f} ms")
    console.print(title, soft_wrap=True)
    for line in verdict.evidence():
        console.print(Text(f"  {line}"), soft_wrap=True)
    if verdict.outcome.is_finding:
        console.print(Text(verdict.code()), soft_wrap=True)
