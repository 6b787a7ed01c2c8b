"""Options for commands that run on other torch versions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from equivcheck.cli.options import F
from equivcheck.quality.versions.environments import CPU_INDEX, OWN_INDEX, Environments, default_cache, parse_environment

if TYPE_CHECKING:
    from equivcheck.quality.versions.environments import Installation


def _given(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[Installation, ...]:  # noqa: ARG001
    return tuple(map(parse_environment, value))


torch_option = click.option(
    "--torch",
    "versions",
    metavar="VERSIONS",
    default="2.9..",
    show_default=True,
    help="Range of torch versions (2.9..2.15: last release of each minor version) or list (2.9.1,2.13).",
)


def environment_options(command: F) -> F:
    """Decorator that adds the options ``--python``, ``--cache`` and ``--index-url`` to a command."""
    python = click.option(
        "--python",
        "pythons",
        multiple=True,
        callback=_given,
        metavar="VERSION=PYTHON",
        help="Python with this torch version, for example 2.15.0=/path/to/bin/python. Repeatable. For other versions, uv (or "
        "venv and pip) creates environments.",
    )
    cache = click.option(
        "--cache",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder for created environments.  [default: equivcheck/torch in the user's cache folder]",
    )
    index = click.option(
        "--index-url",
        default=CPU_INDEX,
        show_default=True,
        metavar="URL",
        help=f"Package index for torch, by default CPU builds; {OWN_INDEX} for the index that pip or uv is configured with.",
    )
    return python(cache(index(command)))


def environments(pythons: tuple[Installation, ...], cache: Path | None, index_url: str) -> Environments:
    """Return virtual environments with other torch versions, from the options. If one is created, a line on stderr says so."""
    return Environments(
        given={installation.version: installation for installation in pythons},
        cache=(cache or default_cache()).absolute(),
        index_url=index_url,
        tell=lambda line: click.echo(line, err=True),
    )
