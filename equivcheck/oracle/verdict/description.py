"""Text for parts of a verdict, used on the console, in reports and in exceptions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from equivcheck.oracle.verdict.sentences import ranks_with_value
from equivcheck.scenario.scenario import count
from equivcheck.worlds.failure import Failure
from equivcheck.worlds.trace.differences import Difference, Divergence, Phase

MAX_GROUPS = 4
"""Maximum number of lines about ranks, and about groups of further tensors. Further lines are only counted."""
LOSS = "loss"
"""Name of the loss phase and of the only tensor in it. It is printed once."""
LONGEST = 300
"""Maximum characters in an error text."""


def axes_in_words(mesh: Iterable[tuple[str, int]]) -> str:
    """Return the mesh axes with their sizes, such as ``dp 2 x tp 2``. Empty without axes."""
    return " x ".join(f"{name} {size}" for name, size in mesh)


def heading(outcome: str, name: str, kind: str, *about: str) -> str:
    """Return the first line of a verdict on a user's code, such as ``DIVERGED: your training on dp 2, float64, in sim``.

    In this example, `kind` is ``training``, and `about` contains three texts, joined by commas. `kind` is used only if the code
    has no `name`.
    """
    whose = f"'{name}'" if name else f"your {kind}"
    return f"{outcome.upper()}: {whose} on {', '.join(about)}"


def divergence_lines(first: Divergence, followers: tuple[str, ...], num_unnamed: int = 0) -> list[str]:
    """Return lines about the first divergence: its place, both values, and further tensors that differ (`followers`).

    `num_unnamed` counts the differing tensors that `followers` leaves out.
    """
    is_loss = first.phase is Phase.LOSS and first.tensor == LOSS
    tensor = "" if is_loss else f", {first.tensor}{list(first.index) if first.index else ''}"
    lines = [
        f"first: step {first.step}, {first.phase.value}{tensor} {ranks_with_value(first)}",
        f"  expected {first.expected}",
        f"  actual   {first.actual}   ({error_in_words(first)})",
    ]
    if followers:
        beyond = f", then {count(num_unnamed, 'more tensor')}" if num_unnamed else ""
        lines.append(f"then:  {_grouped(followers)}{beyond}")
    return lines


def error_in_words(first: Divergence) -> str:
    """Return the error relative to the tolerance. If the difference is not in a value, return its kind, such as ``missing``."""
    if first.difference is Difference.VALUE:
        return f"{first.error:.3g} x tolerance"
    return ": ".join(filter(None, (first.difference.value.replace("_", " "), first.elsewhere)))


def _grouped(followers: tuple[str, ...]) -> str:
    groups: dict[str, list[str]] = defaultdict(list)
    for follower in followers:
        step, number, phase, tensor = follower.split(" ", 3)
        groups[f"{step} {number} {phase}"].append("" if phase == tensor == LOSS else f" of {tensor}")
    parts = [
        f"{moment}{members[0]}" if len(members) == 1 else f"{moment} of {len(members)} tensors"
        for moment, members in groups.items()
    ]
    rest = len(parts) - MAX_GROUPS
    return ", ".join(parts[:MAX_GROUPS]) + (f" and {count(rest, 'more phase')}" if rest > 0 else "")


def rank_lines(failure: Failure) -> list[str]:
    """Return one line for each group of ranks that failed in the same way or wait in the same call."""
    places: dict[str, list[str]] = defaultdict(list)
    for report in failure.reports:
        places[shorten_to_line(f"{report.state.value} {report.error or report.pending}")].append(str(report.rank))
    lines = [f"rank{'s' if len(members) > 1 else ''} {', '.join(members)} {where}" for where, members in places.items()]
    rest = len(lines) - MAX_GROUPS
    return lines if rest <= 0 else [*lines[:MAX_GROUPS], f"and {count(rest, 'more rank')} elsewhere"]


def shorten_to_line(text: str) -> str:
    """Put a text on one line, and shorten it to `LONGEST` characters."""
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def failure_line(what: str, error: Exception) -> str:
    """Return one line about an error in a part of equivcheck's work, such as ``diagnosis failed: TypeError: ...``."""
    return shorten_to_line(f"{what} failed: {type(error).__name__}: {error}")
