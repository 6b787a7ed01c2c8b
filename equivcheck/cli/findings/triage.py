"""`equivcheck triage`: list findings by status, and accept them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from equivcheck.cli.options import console, json_option, print_json, store_option
from equivcheck.cli.shell import ExitCode
from equivcheck.errors import UsageError
from equivcheck.system.printable import escape_unprintable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equivcheck.campaign.history.standing import Record

_USUAL_DAYS = 90


@click.command()
@click.option("--accept", metavar="FINDING", help="Accept this finding: it fails no run until the date --until.")
@click.option("--reason", metavar="TEXT", help="Reason for --accept.")
@click.option(
    "--until",
    type=click.DateTime(["%Y-%m-%d"]),
    metavar="YYYY-MM-DD",
    help=f"Last day for --accept, in UTC.  [default: {_USUAL_DAYS} days from now]",
)
@click.option("--withdraw", metavar="FINDING", help="No longer accept this finding.")
@store_option
@json_option
def triage(  # noqa: PLR0913, PLR0917 - options
    accept: str | None, reason: str | None, until: datetime | None, withdraw: str | None, store: Path, as_json: bool
) -> ExitCode:
    """List findings by status, and accept them.

    A finding is new, still there, fixed or back again. The list names the first and the last run in which it failed. FINDING is
    the first digits of a fingerprint. Exit code 1 if a finding still shows and is not accepted.
    """
    from equivcheck.campaign.history import standing
    from equivcheck.campaign.history.history import History

    if accept is not None and withdraw is not None:
        raise UsageError("--accept and --withdraw are not valid together. Expected only one of them")
    if (accept is None) != (reason is None) or (accept is None and until is not None):
        raise UsageError("--accept needs --reason. Options --reason and --until are only valid with --accept")
    history = History(store)
    if accept is not None and reason is not None:
        usual = datetime.now(UTC) + timedelta(days=_USUAL_DAYS)
        standing.accept(history, _find(accept, standing.records(history), store), reason, (until or usual).date())
    if withdraw is not None:
        standing.withdraw(history, _find(withdraw, standing.records(history), store))
    return _listed(standing.records(history), as_json=as_json)


def _listed(records: Sequence[Record], *, as_json: bool) -> ExitCode:
    from equivcheck.report.standing_text import print_standings, standing_object

    if as_json:
        print_json({"findings": [standing_object(record, fails=record.is_open) for record in records]})
    else:
        print_standings(console(), records, lambda record: record.is_open)
    return ExitCode.FINDINGS if any(record.is_open for record in records) else ExitCode.NOTHING_FOUND


def _find(prefix: str, records: Sequence[Record], store: Path) -> str:
    """Look up the fingerprint with this prefix. Raises `UsageError` if no fingerprint or several have it."""
    marks = [record.fingerprint for record in records if prefix and record.fingerprint.startswith(prefix)]
    if len(marks) == 1:
        return marks[0]
    there = ", ".join(record.fingerprint for record in records) or "nothing"
    number = "several" if marks else "no"
    raise UsageError(
        escape_unprintable(
            f"finding {prefix!r} is not valid: {number} findings of {store} begin with it. Expected one of {there}"
        )
    )
