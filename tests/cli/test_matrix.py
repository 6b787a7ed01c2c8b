"""`equivcheck matrix` checks a recipe."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner, Result

from equivcheck.cli import main
from equivcheck.user.matrix.text import HEADINGS
from support.processes import children_of, end_soon

pytestmark = pytest.mark.usefixtures("workers_are_forked")

RECIPE = """
import os
import threading

import torch
from torch.nn.parallel import DistributedDataParallel

import equivcheck

def ddp(model, mesh):
    import beside
    return DistributedDataParallel(model)

def no_reduction(model, mesh):
    return None

def dies(model, mesh):
    os._exit(7)

def waits(model, mesh):
    print("waiting")
    threading.Event().wait()

def raises(model, mesh):
    raise RuntimeError("no <model>")

matrix = equivcheck.Matrix(
    model=lambda: torch.nn.Linear(3, 2),
    batches=[(torch.arange(12.0).view(4, 3) / 10, torch.zeros(4, 2))] * 3,
    loss=torch.nn.functional.mse_loss,
    optimizer=torch.optim.SGD,
    mesh={"dp": 2},
    layouts={
        "ddp": {"parallelize": ddp},
        "on purpose": {"parallelize": no_reduction, "expected": "diverged"},
        "raises": {"parallelize": raises},
        "dies": {"parallelize": dies},
        "waits": {"parallelize": waits},
    },
)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe in its own folder, next to a module that it imports."""
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    tmp_path.joinpath("beside.py").touch()
    return path


def run(*arguments: object) -> Result:
    """Run a command line."""
    return CliRunner().invoke(main, ["matrix", *map(str, arguments)])


def test_a_table_and_every_report_tell_the_same(recipe: Path, tmp_path: Path) -> None:
    """Rows have the recipe's order; an unexpected outcome gives exit code 1."""
    junit, html = tmp_path / "junit.xml", tmp_path / "page.html"
    chosen = ("--layout", "on purpose", "--layout", "raises", "--layout", "ddp")
    result = run(recipe, *chosen, "-n", 1, "--junit", junit, "--html", html)
    assert result.exit_code == 1, result.output
    lines = [re.split(r" {2,}", line.strip()) for line in result.stdout.splitlines()]
    rows = {line[0]: line[1:] for line in lines if len(line) > 4}
    assert list(rows) == ["layout", "ddp", "on purpose", "raises"]
    assert rows["ddp"][:3] == ["dp 2", "equivalent", "1"]
    assert rows["on purpose"][:2] == ["dp 2", "diverged, as expected"]
    assert rows["raises"][:3] == ["dp 2", "crashed", "-"]
    assert "on purpose: step 0 gradient weight" in result.stdout
    assert "ranks 0, 1 raised RuntimeError" in result.stdout
    assert "error: no <model>" in result.stdout
    assert "3 layouts: 1 equivalent; 1 diverged, as expected; 1 crashed" in result.stdout
    assert sorted(line.split(" ")[0] for line in result.stderr.splitlines()) == ["1", "2", "3"]
    _require_junit(junit)
    _require_page(html.read_text("utf-8"))


def _require_junit(path: Path) -> None:
    suite = ET.parse(path).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "1", "0")
    failures = {case.get("name"): case.find("failure") for case in suite}
    assert failures["ddp"] is failures["on purpose"] is None
    failure = failures["raises"]
    assert failure is not None
    assert "no <model>" in (failure.text or "")


def _require_page(page: str) -> None:
    """Check that a page loads nothing from elsewhere, and escapes errors."""
    assert "no &lt;model&gt;" in page
    assert "no <model>" not in page
    assert not re.findall(r"<script|<link|<img|src=|href=|url\(|@import|https?://", page)
    assert page.count("<details") == 3
    assert page.count("<details open") == 1
    assert "@media (max-width: 40rem)" in page
    assert [column for column in ("mesh", "outcome", *HEADINGS) if page.count(f'data-column="{column}"') != 3] == []


@pytest.mark.slow
def test_processes_that_die_and_interruptions_keep_what_was_found(recipe: Path) -> None:
    """A worker that dies costs only its layout; Ctrl-C ends a hanging layout and leaves no process."""
    command = [sys.executable, "-m", "equivcheck", "matrix", str(recipe), "-n", "2", "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    while not (line := process.stderr.readline()).startswith("4 "):
        assert line or process.poll() is None, "it ended before four layouts were through"
    children = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    found = json.loads(output)
    assert [(row["name"], row["outcome"]) for row in found["layouts"]] == [
        ("ddp", "equivalent"),
        ("on purpose", "diverged"),
        ("raises", "crashed"),
        ("dies", None),
    ]
    assert (found["asked"], found["interrupted"], found["passed"]) == (5, True, False)
    assert found["layouts"][3]["error"] == "the process that checked it exited with code 7"
    assert "error: layout 'dies' was not checked" in errors
    assert process.returncode == 2
    assert end_soon(*children)


def test_bad_input_is_one_clear_line(recipe: Path) -> None:
    """An unknown layout gives exit code 2 and one line that lists the recipe's layouts."""
    result = run(recipe, "--layout", "nope", "-n", 1)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "layout 'nope' is not valid" in result.stderr
    assert "ddp, on purpose, raises, dies, waits" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_recipe_that_ends_its_process_is_named(tmp_path: Path) -> None:
    """A recipe that calls `os._exit` gives exit code 2 and one line."""
    path = tmp_path / "recipe.py"
    path.write_text("import os\nos._exit(3)")
    result = run(path, "-n", 1)
    assert (result.exit_code, result.stdout) == (2, "")
    assert (
        f"{path} is not valid: the process that imported it exited with code 3. Expected a file that can be imported"
        in result.stderr
    )
    assert result.stderr.count("\n") == 1


def test_reports_that_cannot_be_written_are_refused_before_anything_runs(recipe: Path, tmp_path: Path) -> None:
    """Otherwise the results would be lost."""
    result = run(recipe, "--html", tmp_path / "missing" / "page.html")
    assert result.exit_code == 2
    assert "does not exist. Expected a file in an existing folder" in result.stderr
