"""Runs a command in all processes that torchrun started. Only rank 0 prints."""

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
    """Run a command under torchrun. Rank 0's process executes it and prints; the other processes only serve as ranks.

    All processes end with the same exit code. If torchrun did not start them, the first process raises `UsageError`, and the
    others return `ExitCode.USAGE`.
    """
    first = is_first_rank(os.environ)
    try:
        place_of(os.environ)
    except UsageError:
        if first:
            raise
        return ExitCode.USAGE
    # gloo's C++ code prints "connected" to stdout, where only results may stand.
    if first:
        results = os.dup(1)
        os.dup2(2, 1)
        sys.stdout = os.fdopen(results, "w", encoding="utf-8")
    else:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with standard_streams():
        code = _code(command, first=first)
        sys.stdout.flush()
        sys.stderr.flush()
        # torchrun stops processes that outlive the first failed one, which would change their exit code.
        os._exit(code)


def _code(command: Callable[[], ExitCode], *, first: bool) -> ExitCode:
    from equivcheck.worlds.pool import torchrun_ranks

    try:
        return torchrun_ranks().on_first_rank(lambda: _spoken(command))
    except KeyboardInterrupt:
        return report(click.Abort()) if first else ExitCode.CANNOT_RUN
    except UsageError as error:  # every process has the same arguments and raises the same error
        return report(error) if first else ExitCode.USAGE
    except Exception as error:
        return report(error)


def _spoken(command: Callable[[], ExitCode]) -> ExitCode:
    # Rank 0 writes all output before the other processes hear that it is done.
    try:
        return command()
    except Exception as error:
        return report(error)
    finally:
        sys.stdout.flush()
