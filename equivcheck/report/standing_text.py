"""Formats findings with their status over all campaigns, as text and as JSON values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from equivcheck.campaign.history.standing import Record, Sighting, Standing
from equivcheck.scenario.scenario import count
from equivcheck.system.printable import escape_unprintable, shorten

_LONGEST_REASON = 200
_STYLES = {
    Standing.NEW: "bold red",
    Standing.BACK: "bold red",
    Standing.STILL: "yellow",
    Standing.FIXED: "green",
    Standing.ON_FILE: "yellow",
}


def print_standings(console: Console, records: Sequence[Record], fails: Callable[[Record], bool]) -> None:
    """Print how many findings have each standing, such as "new", then three lines for each finding.

    Findings that make a campaign fail are marked and come first.
    """
    counts = Counter(record.standing for record in records)
    shown = ", ".join(f"{counts[standing]} {standing.value}" for standing in Standing if counts[standing])
    console.print(Text(f"{count(len(records), 'finding')} over all runs{': ' if shown else ''}{shown}"), soft_wrap=True)
    for record in sorted(records, key=fails, reverse=True):
        for line in _lines(record, fails(record)):
            console.print(line, soft_wrap=True)


def standing_object(record: Record, *, fails: bool) -> dict[str, Any]:
    """Convert a finding's history to a JSON object. `fails` says whether it makes the campaign fail."""
    values = asdict(record)
    del values["decided_by"]
    return values | {"outcome": record.outcome.value, "standing": record.standing.value, "fails": fails}


def _lines(record: Record, fails: bool) -> Iterator[Text]:
    mark = "  fails: " if fails else "  "
    name = escape_unprintable(f"{record.fingerprint} {record.outcome.value} {record.name}")
    yield Text.assemble(mark, (record.standing.value, _STYLES[record.standing]), f" {name}")
    yield Text(f"    {escape_unprintable(shorten(' '.join(record.reason.split()), _LONGEST_REASON))}")
    accepted = f"; accepted until {record.accepted.until}: {record.accepted.reason}" if record.accepted else ""
    yield Text(escape_unprintable(f"    first seen {where_seen(record.first)}; last seen {where_seen(record.last)}{accepted}"))


def where_seen(sighting: Sighting) -> str:
    """Describe the campaign in which a finding was seen, with the commits of torch and of the user's repository.

    Example: ``2026-01-31 with torch 2.14.0 (1a2b3c4d) at 9f8e7d6c``.
    """
    built = f" ({sighting.torch_commit[:8]})" if sighting.torch_commit else ""
    at = f" at {sighting.revision[:8]}" if sighting.revision else ""
    return f"{sighting.began[:10]} with torch {sighting.torch}{built}{at}"
