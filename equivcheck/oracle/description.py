"""A verdict in words: at most ten lines, the same for every face."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from equivcheck.scenario.words import count, in_words
from equivcheck.worlds.failure import Failure

if TYPE_CHECKING:
    from equivcheck.oracle.verdict import Verdict
    from equivcheck.trace.differences import Divergence

MAX_GROUPS = 4
"""Lines on ranks, or groups of tensors that differ as well, before the rest is counted."""
LONGEST = 300
"""Characters of what a rank raised."""
AGAIN = "again: the scenario below, as @example(...) of a test, or as JSON for `equivcheck check FILE`"


def heading(verdict: Verdict) -> str:
    """What was checked where: ``ddp on 2 ranks, widths 1-1, SGD, 1 microbatch of 2 rows, 1 step, float64, in sim``."""
    return f"{in_words(verdict.scenario)}, in {verdict.world}"


def evidence(verdict: Verdict) -> list[str]:
    """What was found, a line each: without the outcome, and without the scenario as code."""
    if not verdict.outcome.is_finding:
        return _plainly(verdict)
    first = verdict.divergence
    lines = [f"what: {_short(verdict.reason)}"] if first is None else of_divergence(first, verdict.followers)
    if verdict.failure is not None and verdict.diagnosis is None:
        lines += of_ranks(verdict.failure)
    lines += _why(verdict)
    if verdict.confirmed:
        lines.append(f"confirmed: {verdict.confirmed}")
    return [*lines, AGAIN]


def describe(verdict: Verdict) -> str:
    """All of it, with the scenario as code in the last line."""
    lines = [f"{verdict.outcome.value.upper()}: {heading(verdict)}", *(f"  {line}" for line in evidence(verdict))]
    return "\n".join([*lines, repr(verdict.scenario)])


def _plainly(verdict: Verdict) -> list[str]:
    lines = [verdict.reason or f"the largest error is {verdict.worst_error:.2g} of its tolerance"]
    if verdict.undecided:
        lines.append(verdict.undecided)
    return [*lines, f"on file as {verdict.known}"] if verdict.known else lines


def of_divergence(first: Divergence, followers: tuple[str, ...]) -> list[str]:
    """Where it is, both values, and which other tensors follow."""
    lines = [
        f"first: step {first.step}, {first.phase.value}, {first.tensor}{list(first.index) if first.index else ''} {_who(first)}",
        f"  expected {first.expected}",
        f"  actual   {first.actual}   ({_how_far(first)})",
    ]
    if followers:
        lines.append(f"then:  {_grouped(followers)}")
    return lines


def _who(first: Divergence) -> str:
    return "averaged over ranks" if first.rank < 0 else f"on rank {first.rank}"


def _how_far(first: Divergence) -> str:
    words = first.difference.value.replace("_", " ")
    return f"{first.error:.3g} x tolerance" if words == "value" else words


def _grouped(followers: tuple[str, ...]) -> str:
    """Tensors that differ as well, by moment: ``step 0 gradient of 3 more tensors, step 0 update of 4``."""
    groups: dict[str, list[str]] = defaultdict(list)
    for follower in followers:
        step, number, phase, tensor = follower.split(" ", 3)
        groups[f"{step} {number} {phase}"].append(tensor)
    parts = [
        f"{moment} of {members[0]}" if len(members) == 1 else f"{moment} of {len(members)} tensors"
        for moment, members in groups.items()
    ]
    rest = len(parts) - MAX_GROUPS
    return ", ".join(parts[:MAX_GROUPS]) + (f" and {count(rest, 'more moment')}" if rest > 0 else "")


def of_ranks(failure: Failure) -> list[str]:
    """Where each rank was, those in the same place in one line."""
    places: dict[str, list[str]] = defaultdict(list)
    for report in failure.reports:
        places[_short(f"{report.state.value} {report.error or report.pending}")].append(str(report.rank))
    lines = [f"rank {', '.join(members)} {where}" for where, members in places.items()]
    rest = len(lines) - MAX_GROUPS
    return lines if rest <= 0 else [*lines[:MAX_GROUPS], f"and {count(rest, 'more rank')} elsewhere"]


def _why(verdict: Verdict) -> list[str]:
    if verdict.diagnosis is not None:
        lines = [f"why:   {_short(verdict.diagnosis.sentence)}"]
    elif verdict.drift:
        lines = ["why:   nothing that is known to go wrong explains it"]
    else:
        return []
    return [*lines, f"where: {verdict.drift}"] if verdict.drift else lines


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
