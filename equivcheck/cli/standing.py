"""A command that every process of a world runs, of which one speaks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import click

from equivcheck.cli.shell import ExitCode, report
from equivcheck.errors import UsageError
from equivcheck.system.streams import standard_streams
from equivcheck.worlds.torchrun.place import is_first_rank, place_of


def on_all_ranks(command: Callable[[], ExitCode]) -> ExitCode:
    """Do what a command does in rank 0's process, with ranks in all of them, and end each with the same exit code.

    They end at once: torchrun stops those that take longer than the first that failed, and theirs would be another code.
    Returns, with nothing done, where nobody has started such a world; then raises `UsageError` in the first process.
    """
    first = is_first_rank(os.environ)
    try:
        place_of(os.environ)
    except UsageError:
        if first:
            raise
        return ExitCode.USAGE
    _keep_stdout(for_results=first)
    with standard_streams():
        code = _code(command, first=first)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _code(command: Callable[[], ExitCode], *, first: bool) -> ExitCode:
    from equivcheck.worlds.pool import torchrun_ranks

    try:
        return torchrun_ranks().on_first_rank(lambda: _spoken(command))
    except KeyboardInterrupt:
        return report(click.Abort()) if first else ExitCode.CANNOT_RUN
    except UsageError as error:  # of what is the same in all processes
        return report(error) if first else ExitCode.USAGE
    except Exception as error:
        return report(error)


def _spoken(command: Callable[[], ExitCode]) -> ExitCode:
    """What a command does, said in full before others hear that it is done."""
    try:
        return command()
    except Exception as error:
        return report(error)
    finally:
        sys.stdout.flush()


def _keep_stdout(*, for_results: bool) -> None:
    """Let nothing else print there: what C++ does (gloo, that it is connected) goes to stderr, all of other ranks nowhere."""
    if for_results:
        results = os.dup(1)
        os.dup2(2, 1)
        sys.stdout = os.fdopen(results, "w", encoding="utf-8")
    else:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
