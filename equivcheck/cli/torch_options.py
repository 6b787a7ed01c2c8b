"""Options of the commands that run on other versions of torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from equivcheck.cli.options import F, Option
from equivcheck.quality.versions.environments import CPU_INDEX, OWN_INDEX, Environments, default_cache, given

if TYPE_CHECKING:
    from equivcheck.quality.versions.environments import Installation


def _given(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[Installation, ...]:  # noqa: ARG001
    return tuple(map(given, value))


def torch_option(default: str) -> Option:
    """``--torch``."""
    text = "Versions of torch: a range such as 2.9..2.15 (the last release of each minor version), or a list such as 2.9.1,2.13."
    return click.option("--torch", "versions", metavar="VERSIONS", default=default, show_default=True, help=text)


def environment_options(command: F) -> F:
    """``--python``, ``--cache`` and ``--index-url``, which `environments` takes."""
    python = click.option(
        "--python",
        "pythons",
        multiple=True,
        callback=_given,
        metavar="VERSION=PYTHON",
        help="An interpreter that has this version of torch, as 2.15.0=/path/to/bin/python; may be repeated. For other versions "
        "environments are made, by uv if it is there, else by venv and pip.",
    )
    cache = click.option(
        "--cache",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder of the environments that are made; by default equivcheck/torch in the user's cache folder.",
    )
    index = click.option(
        "--index-url",
        default=CPU_INDEX,
        show_default=True,
        metavar="URL",
        help=f"Where torch is installed from: builds for CPU, unless another index is named; {OWN_INDEX} for the one that pip "
        "or uv is configured with.",
    )
    return python(cache(index(command)))


def environments(pythons: tuple[Installation, ...], cache: Path | None, index_url: str) -> Environments:
    """Where versions of torch are taken from; what is being made is told on stderr."""
    return Environments(
        given={installation.version: installation for installation in pythons},
        cache=(cache or default_cache()).absolute(),
        index_url=index_url,
        tell=lambda line: click.echo(line, err=True),
    )
