"""`equivcheck replay`: check findings again."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from equivcheck.cli.findings.replay_all import replay_all
from equivcheck.cli.options import confirm_option, console, deadline_option, json_option, print_json, store_option, world_option
from equivcheck.cli.shell import ExitCode
from equivcheck.cli.standing import on_all_ranks
from equivcheck.errors import UsageError
from equivcheck.system.choice import PrintableEnum
from equivcheck.system.printable import escape_unprintable
from equivcheck.worlds.pool import TORCHRUN

if TYPE_CHECKING:
    from equivcheck.campaign.findings.finding import Finding
    from equivcheck.oracle.verdict.verdict import CaseVerdict


class ReplayResult(PrintableEnum):
    """Result of checking a finding again, compared with the stored verdict."""

    STILL = "still"
    DIFFERENTLY = "differently"
    NO_LONGER = "no_longer"


_SENTENCES = {
    ReplayResult.STILL: "still shows",
    ReplayResult.DIFFERENTLY: "still fails, but in another way",
    ReplayResult.NO_LONGER: "no longer shows",
}


@click.command()
@click.argument("finding", required=False)
@click.option("--all", "every", is_flag=True, help="Check every finding of the store.")
@store_option
@world_option(None, "How ranks run.  [default: as when it was found]", may_stand=True)
@deadline_option(60.0)
@confirm_option
@json_option
def replay(  # noqa: PLR0913, PLR0917 - options
    finding: str | None, every: bool, store: Path, world: str | None, deadline: float, confirm: bool, as_json: bool
) -> ExitCode:
    """Check a finding again.

    FINDING is a folder, or the first digits of a fingerprint. The check runs in a separate process, because some findings crash
    their process. With --world torchrun it runs in the processes that torchrun started.
    """
    if (finding is None) != every:
        raise UsageError("replay needs a finding or --all. Expected one of them")

    def check(kept: Finding) -> CaseVerdict:
        return check_again(kept, world or kept.verdict.world, deadline, confirm=confirm)

    if finding is None and world == TORCHRUN:
        raise UsageError(
            f"replay --all is not valid with --world {TORCHRUN}: findings need different numbers of ranks. Expected one finding"
        )
    if finding is None:
        return replay_all(store, check, as_json=as_json)
    replayed = partial(_replay, finding, store, check, as_json=as_json)
    return on_all_ranks(replayed) if world == TORCHRUN else replayed()


def _replay(finding: str, store: Path, check: Callable[[Finding], CaseVerdict], *, as_json: bool) -> ExitCode:
    kept = find(finding, store)
    verdict = check(kept)
    again = compare(kept, verdict)
    if as_json:
        print_json(_object(kept, again, verdict))
    else:
        from equivcheck.report.verdict_text import print_verdict

        found = kept.environment
        click.echo(escape_unprintable(f"{kept.fingerprint} {_SENTENCES[again]} (found {found.date} with torch {found.torch})"))
        print_verdict(console(), verdict)
    return ExitCode.NOTHING_FOUND if again is ReplayResult.NO_LONGER else ExitCode.FINDINGS


def check_again(kept: Finding, world: str, deadline: float, *, confirm: bool) -> CaseVerdict:
    """Check a finding's case in a separate process. With `confirm`, a failure is checked once more in gloo."""
    from equivcheck.campaign.plan import explaining_check
    from equivcheck.campaign.workers.process import check_isolated
    from equivcheck.checking.confirm import CONFIRMING, confirmed_by, may_be_confirmed

    beyond = bool(kept.verdict.beyond)
    check = explaining_check if world == TORCHRUN else check_isolated
    verdict = check(kept.verdict.case, world=world, deadline=deadline, beyond=beyond)
    if confirm and may_be_confirmed(verdict):
        again = partial(check_isolated, verdict.case, world=CONFIRMING, deadline=deadline, beyond=beyond)
        return confirmed_by(verdict, again)
    return verdict


def find(finding: str, store: Path) -> Finding:
    """Load a finding by its folder, or by the first digits of its fingerprint.

    Raises `UsageError` if there is none, or more than one.
    """
    from equivcheck.campaign.findings.finding import load_finding
    from equivcheck.campaign.findings.store import FindingStore

    if os.path.isdir(finding) or "/" in finding:
        return load_finding(Path(finding))
    return FindingStore(store).load(finding)


def compare(kept: Finding, verdict: CaseVerdict) -> ReplayResult:
    """Compare a stored finding with a new verdict on its case."""
    from equivcheck.campaign.findings.fingerprint import fingerprint

    if not verdict.outcome.is_finding:
        return ReplayResult.NO_LONGER
    return ReplayResult.STILL if fingerprint(verdict) == kept.fingerprint else ReplayResult.DIFFERENTLY


def _object(kept: Finding, again: ReplayResult, verdict: CaseVerdict) -> dict[str, Any]:
    from equivcheck.campaign.findings.finding import verdict_object
    from equivcheck.scenario.file_format.codec import encode

    return {
        "fingerprint": kept.fingerprint,
        "path": str(kept.path),
        "shows": again.value,
        "found_in": encode(kept.environment),
        "verdict": verdict_object(verdict),
    }
