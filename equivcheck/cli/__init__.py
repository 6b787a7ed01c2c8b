"""Command line. It imports a command only to run it, and torch only if the command needs it."""

from __future__ import annotations

from collections import UserDict
from importlib import import_module
from typing import Any

import click

import equivcheck
from equivcheck.cli.shell import Shell
from equivcheck.system.quiet import quiet_torch

_SECTIONS = {
    "trainings": ("Check your own training", ("matrix", "trainer", "batching", "record", "compare")),
    "cases": ("Check one case", ("check", "dry-run")),
    "searches": ("Search for errors", ("fuzz", "sweep")),
    "findings": ("Look into findings", ("triage", "replay", "report", "export", "bisect", "merge")),
    "checker": ("About the checker", ("doctor", "selftest", "coverage", "versions")),
}
"""Title and commands by folder, ordered as in `equivcheck --help`. Each module defines a command with the module's name."""


class _Commands(UserDict[str, Any]):
    """Commands by name. The data are the folders of their modules."""

    def __getitem__(self, name: str) -> click.Command:
        module = name.replace("-", "_")
        command: click.Command = getattr(import_module(f"equivcheck.cli.{self.data[name]}.{module}"), module)
        return command


@click.group(
    cls=Shell,
    commands=_Commands({name: folder for folder, (_title, names) in _SECTIONS.items() for name in names}),
    sections=dict(_SECTIONS.values()),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(equivcheck.__version__, prog_name="equivcheck")
@click.pass_context
def main(context: click.Context) -> None:
    """Check that a parallel training computes the same values as one device.

    Exit codes: 0 nothing found, 1 findings, 2 wrong usage, 3 the checker itself failed.
    """
    context.with_resource(quiet_torch())
