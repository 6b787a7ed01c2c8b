"""Checks all rows in the matrix of versions: `python -m tools.trainers`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from equivcheck.errors import unknown_name
from tools.trainers.folders import version_folder
from tools.trainers.frameworks import FRAMEWORKS
from tools.trainers.rows import NOT_RUN, Framework, Result, result_of
from tools.trainers.summary import summary
from tools.trainers.written import write_table

ROOT = Path(__file__).parents[2]
SECONDS = 900
"""Limit for all rows of a version."""


def run_version(name: str, version: str, folder: Path, only: str = "") -> tuple[Result, ...]:
    """Check a version in a process of its own. Rows that it did not reach end as ``not run``, and all rows if pip fails."""
    framework = FRAMEWORKS[name]
    try:
        target = version_folder(folder, framework, version)
    except subprocess.CalledProcessError as error:
        return tuple(_not_run(framework, version, only, 0, f"pip failed: {error.stderr[-500:]}"))
    paths = [str(target)] if target is not None else []
    paths += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    environment = os.environ | dict(framework.environment) | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch, "results")
        command = (sys.executable, "-m", "tools.trainers.worker", name, version, str(output), only)
        why = _run(command, environment)
        lines = output.read_text("utf-8").splitlines() if output.exists() else []
    found = tuple(Result(**json.loads(line)) for line in lines)
    return found + tuple(_not_run(framework, version, only, len(found), why))


def _run(command: Sequence[str], environment: dict[str, str]) -> str:
    """Run a command. Returns why it ended early, with the end of its output."""
    try:
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"its process did not end in {SECONDS} s"
    return f"its process ended with {done.returncode}: {done.stderr[-500:]}"


def _not_run(framework: Framework, version: str, only: str, num_done: int, why: str) -> Iterator[Result]:
    for row in framework.rows_of(version, only)[num_done:]:
        yield result_of(framework, row, NOT_RUN, why, 0.0)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--folder", type=click.Path(path_type=Path), default="build/trainers", help="Folders of versions, kept.")
@click.option("--only", default="", metavar="TEXT", help="Only configurations that contain this text.")
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True, help="Versions at the same time.")
@click.option("--write", is_flag=True, help="Write the table to docs/results.")
def main(names: tuple[str, ...], folder: Path, only: str, jobs: int, write: bool) -> None:
    """Check all versions of the frameworks NAMES, or of all. Exit code 1 if a row does not end as expected."""
    for name in names:
        if name not in FRAMEWORKS:
            raise unknown_name("framework", name, FRAMEWORKS)
    tasks = [(name, version) for name in names or FRAMEWORKS for version in FRAMEWORKS[name].versions]
    tasks = [task for task in tasks if FRAMEWORKS[task[0]].rows_of(task[1], only)]
    results: list[Result] = []
    with ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(lambda task: run_version(task[0], task[1], folder.resolve(), only), tasks):
            for result in found:
                click.echo(_line(result))
            results += found
    for line in summary(results):
        click.echo(line)
    wrong = sum(not result.is_expected for result in results)
    click.echo(f"{len(results)} rows, {wrong} not as expected")
    if write:
        write_table(results)
    if wrong or not results:
        sys.exit(1)


def _line(result: Result) -> str:
    mark = "" if result.is_expected else "NOT EXPECTED: "
    what = f"{result.framework} {result.version}, {result.configuration}: {result.outcome.upper()} in {result.seconds:.1f} s"
    return f"{mark}{what}{f', {result.cause}' if result.cause else ''}"


if __name__ == "__main__":
    main()
