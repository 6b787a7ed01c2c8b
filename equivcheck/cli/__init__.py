"""The command line. It imports a command when that command is asked for, and torch only when a command needs it."""

from __future__ import annotations

from collections import UserDict
from importlib import import_module
from typing import Any

import click

import equivcheck
from equivcheck.cli.shell import Shell
from equivcheck.system.quiet import quiet_torch


class _Commands(UserDict[str, Any]):
    """Commands by name; the data are names of modules, each of which defines a command with its own name."""

    def __getitem__(self, name: str) -> click.Command:
        module = self.data[name]
        command: click.Command = getattr(import_module(f"equivcheck.cli.{module}"), module.rpartition(".")[2])
        return command


_COMMANDS = _Commands(
    {
        "check": "check",
        "matrix": "matrix",
        "fuzz": "fuzz",
        "coverage": "coverage",
        "replay": "findings.replay",
        "triage": "findings.triage",
        "report": "report",
        "merge": "findings.merge",
        "bisect": "findings.bisect",
        "versions": "versions",
        "export": "findings.export",
        "dry-run": "dry_run",
        "doctor": "doctor",
        "selftest": "selftest",
        "sweep": "sweep",
    }
)


@click.group(cls=Shell, commands=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(equivcheck.__version__, prog_name="equivcheck")
@click.pass_context
def main(context: click.Context) -> None:
    """Does this parallel training compute what one device computes?

    Exit codes: 0 nothing found, 1 findings, 2 usage, 3 the checker itself could not run.
    """
    context.with_resource(quiet_torch())
