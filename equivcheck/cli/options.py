"""Options that several commands share, and how they print."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
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
    """What adds an option to a command."""

    def __call__(self, command: F, /) -> F:
        """The command with the option."""


json_option = click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object on stdout.")
store_option = click.option(
    "--store",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_STORE,
    show_default=True,
    help="Folder of the findings.",
)
confirm_option = click.option("--confirm", is_flag=True, help="Run a finding again, on processes (gloo).")


def deadline_option(default: float) -> Option:
    """``--deadline``."""
    text = "Seconds that ranks may be idle, or compute without a call to communicate, before they count as hung."
    return click.option("--deadline", type=click.FloatRange(min=0, min_open=True), default=default, show_default=True, help=text)


def world_option(default: str | None, text: str = "Where the ranks run.", *, may_stand: bool = False) -> Option:
    """``--world``; with one that stands already, of which every process runs the command, where it `may_stand`."""
    worlds = click.Choice(WORLDS_WITH_DATA) if may_stand else _WorldOfItsOwn(LOCAL_WORLDS)
    return click.option("--world", type=worlds, default=default, show_default=default is not None, help=text)


def as_shard(context: click.Context, parameter: click.Parameter, value: str) -> Shard:  # noqa: ARG001
    """The value of ``--shard``, such as ``2/8``."""
    from equivcheck.campaign.shard import parse_shard

    try:
        return parse_shard(value)
    except UsageError as error:
        raise click.BadParameter(str(error)) from None


class _WorldOfItsOwn(click.Choice[str]):
    """Worlds that a command starts itself."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Say of a world that stands what takes it."""
        if value == TORCHRUN:
            self.fail(f"{value} runs one check; allowed: {', '.join(self.choices)}, or `check FILE --world {value}`", param, ctx)
        return super().convert(value, param, ctx)


def check_layouts(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:  # noqa: ARG001
    """Refuse the name of a layout that does not exist, and list those that do."""
    if value:
        from equivcheck.layouts.composition.registry import kinds_of

        try:
            for name in value:
                kinds_of(name)
        except UsageError as error:
            raise click.BadParameter(str(error)) from None
    return value


def output_file(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:  # noqa: ARG001
    """Refuse, before there is anything to lose, what a file cannot be written to, and what writing would replace by one."""
    if value is not None and not value.parent.is_dir():
        raise click.BadParameter(f"{value.parent} is no folder; allowed: a file in one")
    if value is not None and value.exists() and not value.is_file():
        raise click.BadParameter(f"{value} is no regular file; allowed: a new file, or a regular one")
    return value


html_option = click.option(
    "--html", type=click.Path(path_type=Path), callback=output_file, metavar="FILE", help="Also write an HTML page."
)


def write_page(html: Path | None, write: Callable[[Path], object]) -> None:
    """Write a page if one was asked for; where that cannot be done, a line on stderr, as what it shows is printed as well."""
    if html is None:
        return
    try:
        write(html)
    except OSError as error:
        click.echo(f"{html} is not written: {error}", err=True)


layouts_option = click.option(
    "--layout", "layouts", multiple=True, callback=check_layouts, metavar="NAME", help="Only this layout; may be repeated."
)


COLUMNS = 80
"""Width of text for a screen."""


def console(*, stderr: bool = False, width: int = 160) -> Console:
    """A console for people on stdout or stderr, as wide as the terminal; elsewhere `width` columns wide."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, markup=False, width=None if stream.isatty() else width)


def print_json(value: dict[str, Any]) -> None:
    """One object on stdout, strict JSON."""
    click.echo(json.dumps(value, allow_nan=False))
