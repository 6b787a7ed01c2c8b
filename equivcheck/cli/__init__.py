"""The command line. Importing it imports no torch: `--help` is quick, and a command imports what it needs."""

from __future__ import annotations

import click

import equivcheck
from equivcheck.cli.bench import bench
from equivcheck.cli.check import check
from equivcheck.cli.coverage import coverage
from equivcheck.cli.doctor import doctor
from equivcheck.cli.dry_run import dry_run
from equivcheck.cli.findings.bisect import bisect
from equivcheck.cli.findings.export import export
from equivcheck.cli.findings.merge import merge
from equivcheck.cli.findings.replay import replay
from equivcheck.cli.findings.triage import triage
from equivcheck.cli.fuzz import fuzz
from equivcheck.cli.matrix import matrix
from equivcheck.cli.report import report
from equivcheck.cli.selftest import selftest
from equivcheck.cli.shell import Shell
from equivcheck.cli.sweep import sweep
from equivcheck.cli.versions import versions
from equivcheck.quiet import quiet_torch


@click.group(cls=Shell, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(equivcheck.__version__, prog_name="equivcheck")
@click.pass_context
def main(context: click.Context) -> None:
    """Does this parallel training compute what one device computes?

    Exit codes: 0 nothing found, 1 findings, 2 usage, 3 the checker itself could not run.
    """
    context.with_resource(quiet_torch())


for command in (
    check,
    matrix,
    fuzz,
    coverage,
    replay,
    triage,
    report,
    merge,
    bisect,
    versions,
    export,
    dry_run,
    doctor,
    bench,
    selftest,
    sweep,
):
    main.add_command(command)
