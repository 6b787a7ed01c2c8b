"""`equivcheck replay --all`: check a store's findings again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from equivcheck.cli.options import print_json
from equivcheck.cli.shell import ExitCode
from equivcheck.scenario.scenario import count
from equivcheck.system.printable import escape_unprintable

if TYPE_CHECKING:
    from equivcheck.campaign.findings.fate import ReplayedFinding
    from equivcheck.campaign.findings.finding import Finding
    from equivcheck.campaign.findings.store import FindingStore
    from equivcheck.oracle.verdict.verdict import CaseVerdict


def replay_all(store: Path, check: Callable[[Finding], CaseVerdict], *, as_json: bool) -> ExitCode:
    """Check all findings in a store again, and print one line for each, then the totals."""
    from equivcheck.campaign.findings.environment import environment
    from equivcheck.campaign.findings.store import FindingStore

    torch, found = environment().torch, []
    for replayed in each_replayed(FindingStore(store), check, torch):
        found.append(replayed)
        if not as_json:
            click.echo(escape_unprintable(_line(replayed)))
    if as_json:
        print_json({"torch": torch, "counts": _counts(found), "findings": [_object(replayed) for replayed in found]})
    else:
        parts = ", ".join(f"{fate} {number}" for fate, number in _counts(found).items())
        click.echo(f"{count(len(found), 'finding')} on torch {torch}: {parts}" if found else f"no findings in {store}")
    return ExitCode.FINDINGS if any(replayed.fate.is_finding for replayed in found) else ExitCode.NOTHING_FOUND


def each_replayed(store: FindingStore, check: Callable[[Finding], CaseVerdict], torch: str) -> Iterator[ReplayedFinding]:
    """Check all findings in a store again, and yield the results. Progress and unreadable findings go to stderr."""
    from equivcheck.campaign.findings.fate import replayed
    from equivcheck.campaign.findings.finding import BrokenFinding

    marks = store.fingerprints()
    for number, mark in enumerate(marks, start=1):
        click.echo(f"replaying {_in_a_line(mark)}, {number} of {len(marks)} ...", err=True)
        try:
            kept = store.load(mark)
        except BrokenFinding as error:
            click.echo(_in_a_line(str(error)), err=True)
            continue
        yield replayed(kept, check(kept), torch)


def _in_a_line(text: str) -> str:
    return " ".join(escape_unprintable(text).split())


def _counts(found: list[ReplayedFinding]) -> dict[str, int]:
    return dict(Counter(replayed.fate.value for replayed in found).most_common())


def _line(replayed: ReplayedFinding) -> str:
    kept = replayed.finding
    return f"{kept.fingerprint} {kept.verdict.case.name}: {replayed.words} (found with torch {kept.environment.torch})"


def _object(replayed: ReplayedFinding) -> dict[str, Any]:
    from equivcheck.campaign.findings.finding import verdict_object

    kept = replayed.finding
    return {
        "fingerprint": kept.fingerprint,
        "path": str(kept.path),
        "fate": replayed.fate.value,
        "words": replayed.words,
        "found_with": kept.environment.torch,
        "verdict": verdict_object(replayed.verdict),
    }
