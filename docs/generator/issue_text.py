"""Text for an upstream issue, written from a known difference and the program that shows it."""

from __future__ import annotations

import re

from equivcheck.programs.nouns import TensorProgram
from equivcheck.programs.run.known.difference import KnownDifference
from equivcheck.programs.run.script import script_of
from equivcheck.programs.verdict import ProgramVerdict

_LINK = re.compile(r"^(no report found|http\S+?)( \(.*?\))?: ")
REPORTED = "http"
"""Prefix of a link to a reported difference."""


def is_reported(known: KnownDifference) -> bool:
    """Whether the known difference has an upstream report."""
    return known.link.startswith(REPORTED)


def sentence_of(known: KnownDifference) -> str:
    """Describe the error in one sentence: ``fill_ of partial values fills each``."""
    return _LINK.sub("", known.link)


def title_of(known: KnownDifference) -> str:
    """Issue title."""
    return f"[DTensor] {sentence_of(known)}"


def issue_text(known: KnownDifference, program: TensorProgram, verdict: ProgramVerdict | None = None) -> str:
    """Title, description, versions, and a script that needs only torch, as Markdown.

    `program` shows the difference. If it was run, `verdict` adds the expected and the actual result.
    """
    script = script_of(program, f"{sentence_of(known)[:1].upper()}{sentence_of(known)[1:]}.")
    parts = [
        f"# {title_of(known)}",
        f"Seen on torch {', '.join(known.seen_on())} (CPU, gloo).",
        *([f"Not seen on {', '.join(known.unseen_on())}."] if known.unseen_on() else []),
        *([] if verdict is None else [f"```text\n{_found(verdict)}\n```"]),
        "The script compares values and gradients on ranks with those of plain tensors, and exits with 1 if they differ:",
        f"```python\n{script}```",
    ]
    return "\n\n".join(parts) + "\n"


def _found(verdict: ProgramVerdict) -> str:
    first = verdict.divergence
    if first is not None:
        return f"{first.phase.value} {first.tensor}: expected {first.expected}, found {first.actual}"
    culprit = verdict.failure.culprit if verdict.failure else None
    return verdict.reason if culprit is None else culprit.error.partition(", caused by")[0].rpartition("StatementFailed: ")[2]
