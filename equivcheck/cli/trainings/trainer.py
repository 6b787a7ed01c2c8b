"""`equivcheck trainer`: check a framework's trainer in several configurations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from equivcheck.cli.options import json_option, world_option
from equivcheck.cli.shell import ExitCode
from equivcheck.cli.trainings.matrix import exit_code_of, print_found, print_row


def _numbers(kind: Callable[[str], Any], *, or_none: bool = False, least: float = 0) -> Callable[..., tuple[Any, ...]]:
    """Return a callback that reads numbers such as ``1,3``, each at least `least`. With `or_none`, no numbers are allowed too."""

    def read(_context: click.Context, option: click.Parameter, given: str) -> tuple[Any, ...]:
        if or_none and not given:
            return ()
        try:
            numbers = tuple(dict.fromkeys(map(kind, given.split(","))))
        except ValueError:
            numbers = ()
        if not numbers or not all(least <= number < float("inf") for number in numbers):
            raise click.BadParameter(f"{given!r}: expected numbers separated by commas, for example {option.default or '2,3'}")
        return numbers

    return read


@click.command()
@click.argument("name")
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="The trainer's configuration, as JSON.")
@click.option(
    "--model", type=click.Path(path_type=Path), metavar="RECIPE", help="Your model, in a Python file.  [default: a small one]"
)
@click.option(
    "--stage",
    "stages",
    default="",
    callback=_numbers(int, or_none=True),
    metavar="N,...",
    help="ZeRO stages, if the trainer has them.  [default: as in the configuration, or 0,1,2,3]",
)
@click.option(
    "--accumulate",
    default="1,3",
    show_default=True,
    callback=_numbers(int, least=1),
    metavar="N,...",
    help="Microbatches per update.",
)
@click.option(
    "--clip",
    "limits",
    default="0,0.1",
    show_default=True,
    callback=_numbers(float),
    metavar="NORM,...",
    help="Maximum gradient norms; 0 disables clipping.",
)
@click.option("--ranks", type=click.IntRange(min=1), default=2, show_default=True, help="Data-parallel ranks.")
@world_option("gloo", "How ranks run.")
@json_option
def trainer(  # noqa: PLR0913, PLR0917 - options
    name: str,
    config: Path | None,
    model: Path | None,
    stages: tuple[int, ...],
    accumulate: tuple[int, ...],
    limits: tuple[float, ...],
    ranks: int,
    world: str,
    as_json: bool,
) -> ExitCode:
    """Check the trainer NAME (deepspeed or transformers) with your configuration.

    It trains a small model, or the model in --model, with all combinations of --stage, --accumulate and --clip. Every other field
    of the configuration is kept. RECIPE is a Python file that defines an equivcheck.TrainerModel. Exit code 0 if all combinations
    agree with one device, 1 if one differs, 2 if one cannot be checked, 3 if one is inconclusive.
    """
    from equivcheck.errors import unknown_name
    from equivcheck.user.recipe import defined_in
    from equivcheck.user.trainers.model import TrainerModel
    from equivcheck.user.trainers.table import KINDS, check_configurations, configurations, is_undecided

    if name not in KINDS:
        raise unknown_name("trainer", name, KINDS)
    found = check_configurations(
        KINDS[name],
        configurations(KINDS[name], name, {} if config is None else _fields(config), stages),
        accumulate=accumulate,
        limits=limits,
        num_ranks=ranks,
        world=world,
        listener=print_row,
        brought=None if model is None else defined_in(model, TrainerModel),
    )
    print_found(found, as_json=as_json)
    for note in dict.fromkeys(note for row in found.rows if row.verdict is not None for note in row.verdict.notes):
        click.echo(f"note: {note}", err=True)
    code = exit_code_of(found)
    return ExitCode.CANNOT_RUN if code is ExitCode.FINDINGS and is_undecided(found) else code


def _fields(path: Path) -> dict[str, Any]:
    from equivcheck.errors import UsageError

    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"--config {str(path)!r} is not valid: {error}. Expected a file with a JSON object.") from error
    if not isinstance(found, dict):
        raise UsageError(f"--config {str(path)!r} is not valid: it is a {type(found).__name__}. Expected a JSON object.")
    return found
