"""Command line. It imports a command only to run it, and torch only if the command needs it."""

from __future__ import annotations

from collections import UserDict
from importlib import import_module
from typing import Any

import click

import equivcheck
from equivcheck.cli.shell import Shell
from equivcheck.system.quiet import quiet_torch


class _Commands(UserDict[str, Any]):
    """Commands by name. The data are module names; each module defines a command with the module's name."""

    def __getitem__(self, name: str) -> click.Command:
        module = self.data[name]
        command: click.Command = getattr(import_module(f"equivcheck.cli.{module}"), module.rpartition(".")[2])
        return command


_SECTIONS = {
    "Check your own training": {"matrix": "matrix", "batching": "batching", "record": "record", "compare": "compare"},
    "Check one case": {"check": "check", "dry-run": "dry_run"},
    "Search for errors": {"fuzz": "fuzz", "sweep": "sweep"},
    "Look into findings": {
        "triage": "findings.triage",
        "replay": "findings.replay",
        "report": "report",
        "export": "findings.export",
        "bisect": "findings.bisect",
        "merge": "findings.merge",
    },
    "About the checker": {"doctor": "doctor", "selftest": "selftest", "coverage": "coverage", "versions": "versions"},
}
"""Commands and their modules, ordered as in `equivcheck --help`."""


@click.group(
    cls=Shell,
    commands=_Commands({name: module for section in _SECTIONS.values() for name, module in section.items()}),
    sections={title: tuple(section) for title, section in _SECTIONS.items()},
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(equivcheck.__version__, prog_name="equivcheck")
@click.pass_context
def main(context: click.Context) -> None:
    """Check that a parallel training computes the same as on one device.

    Exit codes: 0 nothing found, 1 findings, 2 wrong usage, 3 the checker itself failed.
    """
    context.with_resource(quiet_torch())
