"""The command line. Importing it imports no torch: `--help` is quick, and a command imports what it needs."""

from __future__ import annotations

import click

import equivcheck
from equivcheck.cli.bench import bench
from equivcheck.cli.check import check
from equivcheck.cli.doctor import doctor
from equivcheck.cli.fuzz import fuzz
from equivcheck.cli.replay import replay
from equivcheck.cli.shell import Shell


@click.group(cls=Shell, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(equivcheck.__version__, prog_name="equivcheck")
def main() -> None:
    """Does this parallel training compute what one device computes?

    Exit codes: 0 nothing found, 1 findings, 2 usage, 3 the checker itself could not run.
    """


for command in (check, fuzz, replay, doctor, bench):
    main.add_command(command)
