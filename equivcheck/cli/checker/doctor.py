"""`equivcheck doctor`: show what works on this machine, and why the rest does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from equivcheck.cli.options import console, json_option, print_json
from equivcheck.cli.shell import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from equivcheck.quality.doctor import Probe


@click.command()
@json_option
def doctor(as_json: bool) -> ExitCode:
    """Show which worlds and layouts work on this machine.

    Prints installed versions, runs each layout on two ranks, and lists global state in torch that may make sim differ from gloo.
    """
    from equivcheck.campaign.findings.environment import environment
    from equivcheck.scenario.file_format.codec import encode
    from equivcheck.worlds.audit.found import Search
    from equivcheck.worlds.gloo.fork_server import FORK_SERVER

    versions = encode(environment())
    if not as_json:
        for name, value in versions.items():
            click.echo(f"{name:<12}{value or 'not installed'}")
    with FORK_SERVER.started_early(), Search() as search:  # both import torch while this process does
        from equivcheck.quality.doctor import probe_everything, unclassified_state

        probes = _watched(probe_everything())
        unknown = unclassified_state(search)
    if as_json:
        print_json({"environment": versions, "probes": [encode(probe) for probe in probes], "unknown_state": unknown})
    else:
        console().print(_table(probes))
        click.echo(f"torch state that sim does not know and therefore shares among ranks: {', '.join(unknown) or 'none'}")
    return ExitCode.NOTHING_FOUND if all(probe.works for probe in probes) else ExitCode.CANNOT_RUN


def _watched(probes: Iterator[Probe]) -> list[Probe]:
    """Run all probes and return them. A terminal shows the latest probe until the table is printed."""
    from rich.live import Live
    from rich.text import Text

    screen, done = console(stderr=True), []
    if not screen.is_terminal:
        return list(probes)
    with Live(console=screen, auto_refresh=False, transient=True) as live:
        for probe in probes:
            done.append(probe)
            line = f"{probe.world} {probe.subject}: {_in_words(probe)}"
            live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
    return done


def _in_words(probe: Probe) -> str:
    if not probe.works:
        return probe.reason
    return f"works, with the known issue {probe.known}" if probe.known else "works"


def _table(probes: list[Probe]) -> Table:
    from rich.table import Table

    worlds = list(dict.fromkeys(probe.world for probe in probes))
    table = Table("layout or feature", *worlds, box=None, pad_edge=False, header_style="bold")
    for subject in dict.fromkeys(probe.subject for probe in probes):
        cells = {probe.world: _in_words(probe) for probe in probes if probe.subject == subject}
        table.add_row(subject, *(cells[world] for world in worlds))
    return table
