"""Options shared by several commands, and functions for their output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from equivcheck.campaign.findings.folder import DEFAULT_STORE
from equivcheck.errors import UsageError
from equivcheck.worlds.pool import LOCAL_WORLDS, TORCHRUN, WORLDS_WITH_DATA

if TYPE_CHECKING:
    from rich.console import Console

    from equivcheck.campaign.shard import Shard

F = TypeVar("F", bound=Callable[..., Any])


class Option(Protocol):
    """Decorator for adding an option to a command."""

    def __call__(self, command: F, /) -> F:
        """Return the command with the option."""


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
store_option = click.option(
    "--store",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_STORE,
    show_default=True,
    help="Folder for findings.",
)
workers_option = click.option("--workers", type=click.IntRange(min=1), help="Worker processes.  [default: one per core]")
confirm_option = click.option("--confirm", is_flag=True, help="If the check fails, repeat it on processes (gloo).")


def seconds_option(text: str, default: float | None = None, *, names: tuple[str, ...] = ("--seconds",), **options: Any) -> Option:
    """Return the option ``--seconds``, or another option whose value is in seconds. If there is a default, the help shows it."""
    kind, is_shown = click.FloatRange(min=0, min_open=True), default is not None
    return click.option(*names, type=kind, default=default, show_default=is_shown, help=text, **options)


def deadline_option(default: float) -> Option:
    """Return the option ``--deadline`` with this default, in seconds."""
    text = "Ranks that do not communicate for this many seconds count as hung."
    return seconds_option(text, default, names=("--deadline",))


def seed_option(text: str = "Seed of the generator; always printed.  [default: random]", default: int | None = None) -> Option:
    """Return the option ``--seed``. `text` is its help."""
    return click.option("--seed", type=click.IntRange(min=0), default=default, show_default=default is not None, help=text)


def choice_option(name: str, default: Enum, text: str) -> Option:
    """Return an option for choosing a value from the enum of `default`. `text` is its help.

    The command gets the value as text, not the enum member.
    """
    values = click.Choice([member.value for member in type(default)])
    return click.option(name, type=values, default=default.value, show_default=True, help=text)


def world_option(default: str | None, text: str = "How ranks run.", *, may_stand: bool = False) -> Option:
    """Return the option ``--world``, with the help `text`.

    If `may_stand`, the command can also run in processes started by torchrun, and the option also accepts the value torchrun.
    """
    worlds = click.Choice(WORLDS_WITH_DATA) if may_stand else _WorldOfItsOwn(LOCAL_WORLDS)
    return click.option("--world", type=worlds, default=default, show_default=default is not None, help=text)


def shard_option(text: str) -> Option:
    """Return the option ``--shard``, such as ``2/8``. `text` is its help."""
    return click.option("--shard", metavar="I/N", default="1/1", callback=_as_shard, help=text)


def _as_shard(context: click.Context, parameter: click.Parameter, value: str) -> Shard:  # noqa: ARG001
    from equivcheck.campaign.shard import parse_shard

    try:
        return parse_shard(value)
    except UsageError as error:
        raise click.BadParameter(str(error)) from None


class _WorldOfItsOwn(click.Choice[str]):
    """Choice between the worlds that a command starts itself."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Reject torchrun, and name a command that accepts it."""
        if value == TORCHRUN:
            expected = f"{', '.join(self.choices)}, or `check FILE --world {value}`"
            self.fail(f"{value} is not valid: it runs one check. Expected one of {expected}", param, ctx)
        return super().convert(value, param, ctx)


def check_layouts(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:  # noqa: ARG001
    """Check the option ``--layout``. Raises `click.BadParameter` for an unknown layout."""
    if value:
        from equivcheck.layouts.composition.registry import kinds_of

        try:
            for name in value:
                kinds_of(name)
        except UsageError as error:
            raise click.BadParameter(str(error)) from None
    return value


def output_file(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:  # noqa: ARG001
    """Check an option with an output file at the start of a command. Raises `click.BadParameter` if it cannot be written."""
    if value is not None and not value.parent.is_dir():
        raise click.BadParameter(f"folder {value.parent} does not exist. Expected a file in an existing folder")
    if value is not None and value.exists() and not value.is_file():
        raise click.BadParameter(f"{value} is not a regular file. Expected a new file, or a regular file to replace")
    return value


html_option = click.option(
    "--html", type=click.Path(path_type=Path), callback=output_file, metavar="FILE", help="Also write an HTML page."
)


def write_page(html: Path | None, write: Callable[[Path], object]) -> None:
    """Call `write` with the file `html`, unless it is None.

    If writing fails, a line on stderr says so, and the command goes on.
    """
    if html is None:
        return
    try:
        write(html)
    except OSError as error:
        click.echo(f"{html} is not written: {error}", err=True)


layouts_option = click.option(
    "--layout", "layouts", multiple=True, callback=check_layouts, metavar="NAME", help="Only this layout. Repeatable."
)


COLUMNS = 80
"""Width of text for a terminal."""


def console(*, stderr: bool = False, width: int = 160) -> Console:
    """Return a rich console that prints to stdout or stderr.

    `width` is the line width in columns. It is ignored on a terminal, which has its own width.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, markup=False, width=None if stream.isatty() else width)


def print_json(value: dict[str, Any]) -> None:
    """Print a JSON object in one line on stdout. It must not contain NaN."""
    click.echo(json.dumps(value, allow_nan=False))
