"""`equivcheck doctor`: what works here, and why the rest does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from equivcheck.cli.options import console, json_option, print_json
from equivcheck.cli.shell import ExitCode

if TYPE_CHECKING:
    from rich.table import Table

    from equivcheck.doctor import Probe


@click.command()
@json_option
def doctor(as_json: bool) -> ExitCode:
    """Print installed versions, and test what works here: each layout on two ranks, and where sim may differ from gloo."""
    from equivcheck.doctor import probe_everything, unclassified_state
    from equivcheck.findings.environment import environment
    from equivcheck.scenario.file_format.codec import encode

    versions = environment()
    probes = [_shown(probe) for probe in probe_everything()]
    unknown = unclassified_state()
    if as_json:
        print_json({"environment": encode(versions), "probes": [encode(probe) for probe in probes], "unknown_state": unknown})
    else:
        for name, value in encode(versions).items():
            click.echo(f"{name:<12}{value or 'not installed'}")
        console().print(_table(probes))
        click.echo(f"state of torch that sim knows nothing of, and shares among ranks: {', '.join(unknown) or 'none'}")
    return ExitCode.NOTHING_FOUND if all(probe.works for probe in probes) else ExitCode.CANNOT_RUN


def _shown(probe: Probe) -> Probe:
    click.echo(f"{probe.world} {probe.subject}: {_in_words(probe)}", err=True)
    return probe


def _in_words(probe: Probe) -> str:
    if not probe.works:
        return probe.reason
    return f"works, with the known issue {probe.known}" if probe.known else "works"


def _table(probes: list[Probe]) -> Table:
    from rich.table import Table

    worlds = list(dict.fromkeys(probe.world for probe in probes))
    table = Table("what", *worlds, box=None, pad_edge=False, header_style="bold")
    for subject in dict.fromkeys(probe.subject for probe in probes):
        cells = {probe.world: _in_words(probe) for probe in probes if probe.subject == subject}
        table.add_row(subject, *(cells[world] for world in worlds))
    return table
