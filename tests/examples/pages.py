"""Finds and runs the fenced examples in README and docs.

All examples on a page run in order, in one folder and one namespace:

- ``python`` runs. If its first line is ``# name.py``, it is written to this file instead.
- ``text`` after it is its output.
- ``console`` has commands after ``$``, each with its output.
- ``sh`` has commands that take too long or install something. They do not run, but commands of equivcheck must parse.

Each shown line must be in the real output, in the same order, with the same first word and the same numbers. ``...`` stands for
omitted lines. Times and tolerances depend on the machine, so they are not compared. Wording is not compared either, because other
tests cover it.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

from equivcheck.cli import main
from equivcheck.export.forked import run_forked

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted(path for path in ROOT.glob("docs/**/*.md") if "generated" not in path.parts))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w-]+\.py)\n")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
MEASURED = re.compile(r"\(.*tolerance\)|[\d.e+-]+ of its tolerance|rounding explains [\d.e+-]+|, [\d.]+ m?s$| in [\d.]+s ")
SKIPPED = "..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A fenced code block."""

    language: str
    """Language after the fence."""
    text: str
    """Content of the block."""
    line: int
    """Line of the block's first line in its page."""


def examples(page: Path) -> list[Example]:
    """Return the fenced blocks in a page, in order."""
    text = page.read_text("utf-8")
    return [
        Example(language=found[1], text=found[2], line=text.count("\n", 0, found.start()) + 2) for found in FENCE.finditer(text)
    ]


def run(page: Path) -> list[str]:
    """Run a page's examples in the current folder. Returns an error for each shown line that was not printed."""
    namespace: dict[str, Any] = {"__name__": "__page__"}
    printed, wrong = "", []
    for example in examples(page):
        where = f"{page.name}:{example.line}"
        if example.language == "python":
            printed = run_python(example, where, namespace)
        elif example.language == "console":
            wrong += [missing(shown, run_command(command), f"{where} $ {command}") for command, shown in commands(example)]
        elif example.language == "text":
            wrong.append(missing(example.text, printed, where))
    return list(filter(None, wrong))


def run_python(example: Example, where: str, namespace: dict[str, Any]) -> str:
    """Run code and return what it prints, or write it to the file that its first line names."""
    file = FILE.match(example.text)
    if file:
        Path(file[1]).write_text(example.text, "utf-8")
        return ""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(example.text, where, "exec"), namespace)
    return printed.getvalue()


def run_command(command: str) -> str:
    """Run a command and return its output."""
    name, *arguments = shlex.split(command)
    return RUN[name](arguments)


def commands(example: Example) -> Iterator[tuple[str, str]]:
    """Yield each command in a block with the output shown below it."""
    for part in f"\n{example.text}".split("\n$ ")[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


def run_equivcheck(arguments: list[str]) -> str:
    """Run equivcheck in this process, which has imported torch; except to record, because the recorded command replaces it."""
    if arguments[0] == "record":
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path}
        command = [sys.executable, "-m", "equivcheck", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=environment).stdout
    result = CliRunner().invoke(main, arguments)
    return result.output


def run_pytest(arguments: list[str]) -> str:
    """Run pytest in another process, with the plugin, installed or not."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for name in ("CI", "BUILD_NUMBER", "PYTEST_ADDOPTS"):  # under the first two, pytest prints errors at another width
        environment.pop(name, None)
    plugin = () if is_installed() else ("-p", "equivcheck.pytest_plugin")
    command = [sys.executable, "-m", "pytest", *plugin, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, env=environment).stdout


def is_installed() -> bool:
    """Whether pytest finds the plugin by itself."""
    from importlib.metadata import entry_points

    return any(entry.value == "equivcheck.pytest_plugin" for entry in entry_points(group="pytest11"))


def run_torchrun(arguments: list[str]) -> str:
    """Run a script in forked processes, because torchrun takes seconds longer."""
    *_, ranks, script = arguments
    return run_forked(Path(script), int(ranks), Path.cwd())[1]


def run_python_script(arguments: list[str]) -> str:
    """Run a script from this repository in this process."""
    (script,) = arguments
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return printed.getvalue()


RUN: dict[str, Callable[[list[str]], str]] = {
    "equivcheck": run_equivcheck,
    "pytest": run_pytest,
    "python": run_python_script,
    "torchrun": run_torchrun,
}
"""Runners by the first word in a command."""


def missing(shown: str, printed: str, where: str) -> str:
    """Search the output for all shown lines in order. Returns an error for the first missing line, or an empty string."""
    lines = iter(printed.splitlines())
    for line in shown.splitlines():
        if line.strip() not in ("", SKIPPED) and not any(same(line, other) for other in lines):
            return f"{where}: {line!r} is not, or not there, in\n{printed}"
    return ""


def same(shown: str, printed: str) -> bool:
    """Whether two lines start with the same word and have the same numbers."""
    return first_word(shown) == first_word(printed) and close(numbers(shown), numbers(printed))


def first_word(line: str) -> str:
    """First word in a line, without pytest's mark for errors."""
    words = line.removeprefix("E ").split()
    return words[0] if words else ""


def numbers(line: str) -> list[float]:
    """Numbers in a line."""
    return [float(number) for number in NUMBER.findall(MEASURED.sub("", line))]


def close(these: list[float], those: list[float]) -> bool:
    """Whether numbers are equal up to rounding on another processor."""
    return len(these) == len(those) and all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(these, those, strict=True))


def parse(command: str) -> None:
    """Raise if equivcheck does not have this command or option."""
    name, *arguments = shlex.split(command, comments=True)
    if name == "equivcheck":
        with click.Context(main) as context:
            _, chosen, rest = main.resolve_command(context, arguments)
            assert chosen is not None
            chosen.make_parser(context).parse_args(args=list(rest))
