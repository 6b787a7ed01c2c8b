"""`equivcheck versions`: compare torch versions."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from equivcheck.cli.options import console, html_option, json_option, output_file, print_json, seed_option, write_page
from equivcheck.cli.shell import ExitCode
from equivcheck.cli.torch_options import environment_options, environments, torch_option
from equivcheck.errors import EquivCheckError, UsageError, unknown_name

if TYPE_CHECKING:
    from equivcheck.oracle.known_issues.known import KnownIssue
    from equivcheck.quality.versions.environments import Environments, Installation
    from equivcheck.quality.versions.matrix import Matrix


def _check_issues(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[KnownIssue, ...]:  # noqa: ARG001
    from equivcheck.oracle.known_issues.known import all_known_issues

    issues = {issue.id: issue for issue in all_known_issues()}
    for name in value:
        if name not in issues:
            raise click.BadParameter(str(unknown_name("known issue", name, sorted(issues))))
    return tuple(issues[name] for name in value) or tuple(issues.values())


@click.command()
@torch_option
@environment_options
@click.option("--scenarios", "count", type=click.IntRange(min=0), default=100, show_default=True, help="Number of scenarios.")
@seed_option("Seed of the scenarios.", 1)
@click.option(
    "--issue",
    "issues",
    multiple=True,
    callback=_check_issues,
    metavar="ID",
    help="Only this issue's script. Repeatable.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=output_file,
    default=Path("matrix.json"),
    show_default=True,
    help="File for results. Its versions are not run again if code, scenarios and issues are the same.",
)
@click.option("--again", is_flag=True, help="Also run versions that are already in the file.")
@click.option("--write-shows", is_flag=True, help="Update the table of known issues (only in a checkout).")
@json_option
@html_option
def versions(  # noqa: PLR0913, PLR0917 - options
    versions: str,
    pythons: tuple[Installation, ...],
    cache: Path | None,
    index_url: str,
    count: int,
    seed: int,
    issues: tuple[KnownIssue, ...],
    output: Path,
    again: bool,
    write_shows: bool,
    as_json: bool,
    html: Path | None,
) -> ExitCode:
    """Compare torch versions: doctor, scenarios and known issues.

    Runs the doctor's probes, generated scenarios in sim, and the scripts of known issues. Exit code 1 if a scenario is a finding,
    or if a script shows its issue on other torch versions than the table of known issues says.
    """
    from equivcheck.oracle.known_issues.showing import table_path
    from equivcheck.quality.versions.corpus import draw_scenarios
    from equivcheck.quality.versions.matrix import Matrix, code_digest, load_or_new
    from equivcheck.quality.versions.table import print_matrix
    from equivcheck.scenario.file_format.codec import encode

    if write_shows and not _is_checkout():
        raise UsageError(
            f"--write-shows is not valid: {table_path()} is in an installed package, which must not change. "
            "Expected a source checkout of equivcheck"
        )
    ids = tuple(issue.id for issue in issues)
    matrix = Matrix(code=code_digest(), seed=seed, scenarios=draw_scenarios(count, seed), issues=ids, versions={})
    matrix = matrix if again else load_or_new(output, matrix)
    matrix = _filled(matrix, versions, environments(pythons, cache, index_url), issues, output)
    if write_shows:
        _write_shows(matrix)
    if as_json:
        print_json(encode(matrix))
    else:
        print_matrix(console(), matrix, issues)
    write_page(html, lambda file: _write_page(file, matrix, issues))
    try:
        matrix.save(output)
    except OSError as error:
        raise EquivCheckError(f"results cannot be kept in {output}: {error.strerror or error}") from error
    return ExitCode.FINDINGS if matrix.is_bad(issues) else ExitCode.NOTHING_FOUND


def _filled(matrix: Matrix, named: str, where: Environments, issues: tuple[KnownIssue, ...], output: Path) -> Matrix:
    """Return the matrix with every named version.

    The matrix is written after each version, so an interruption loses at most one.
    """
    from equivcheck.quality.versions.matrix import measure_version

    for version in where.find_versions(named):
        if str(version) in matrix.versions:
            where.tell(f"torch {version}: in {output}; --again runs it again")
            continue
        found = measure_version(where.installation(version), matrix.scenarios, issues, where.tell)
        matrix = matrix.with_version(version, found)
        with contextlib.suppress(OSError):  # reported at the end, after all results are printed
            matrix.save(output)
    return matrix


def _write_page(file: Path, matrix: Matrix, issues: tuple[KnownIssue, ...]) -> None:
    from equivcheck.quality.versions.table import wrong_in
    from equivcheck.report.versions import page
    from equivcheck.scenario.file_format.codec import encode

    wrong = {version: list(wrong_in(found, issues)) for version, found in matrix.versions.items()}
    page.write_page(file, encode(matrix), issues, wrong, is_bad=matrix.is_bad(issues))


def _is_checkout() -> bool:
    from equivcheck.oracle.known_issues.showing import table_path

    return (table_path().parents[3] / "pyproject.toml").is_file()


def _write_shows(matrix: Matrix) -> None:
    """Update the measured entries of the table of known issues, and keep all other entries."""
    from equivcheck.oracle.known_issues.known import all_known_issues
    from equivcheck.oracle.known_issues.showing import measured_results, table_path, written_table
    from equivcheck.quality.versions.matrix import shows_of

    before, now = measured_results(), shows_of(matrix)
    table = {issue.id: {**before.get(issue.id, {}), **now.get(issue.id, {})} for issue in all_known_issues()}
    table_path().write_text(written_table(table), encoding="utf-8")
