"""The commands ``bisect`` and ``replay --all``."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from packaging.version import Version

from equivcheck import check
from equivcheck.campaign.findings.finding import load_finding
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.workers import process
from equivcheck.cli import main
from equivcheck.oracle.known_issues.showing import Showing, Shows
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.quality.versions.scripts import Script
from equivcheck.scenario import Scenario
from equivcheck.scenario.file_format.codec import from_json
from unit.campaign import fakes

HERE = Version(version("torch")).public
EXPORTED = Path(__file__).parents[1] / "known_issues" / "exported"


def run(*arguments: object) -> Result:
    """Run a command line."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Folder of a finding whose scenario has a known issue."""
    scenario = from_json((EXPORTED / "fsdp1_accumulates_one_element.json").read_text("utf-8"))
    verdict = replace(check(scenario), outcome=Outcome.DIVERGED, known="")
    FindingStore(tmp_path).keep(verdict)
    return tmp_path / FindingStore(tmp_path).fingerprints()[0]


def test_a_finding_is_bisected_by_its_script(kept: Path) -> None:
    """The given interpreter runs the script; the result is printed and kept in the finding's folder."""
    result = run("bisect", kept, "--torch", HERE, "--python", f"{HERE}={sys.executable}")
    assert result.exit_code == 1, result.output
    assert result.stdout.splitlines() == [
        f"torch {HERE:<8} shows",
        f"shows in {HERE}, the oldest measured, still shows in {HERE}",
    ]
    found = load_finding(kept).shown_in
    assert found is not None
    assert (found.by.value, [one.torch for one in found.measured]) == ("script", [HERE])


@pytest.mark.slow
def test_a_known_issue_is_bisected_by_its_script() -> None:
    """One object on stdout, progress on stderr."""
    arguments = ("--torch", HERE, "--python", f"{HERE}={sys.executable}", "--json")
    result = run("bisect", "--id", "tensor_parallel_unties", *arguments)
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert (found["by"], found["versions"], found["unmeasured"]) == ("script", [HERE], [])
    assert found["ranges"] == [f">={HERE.rpartition('.')[0]}"]
    assert f"torch {HERE}: shows" in result.stderr


@pytest.mark.parametrize(("shows", "code"), [(Shows.DOES_NOT, 0), (Shows.SHOWS, 1), (Shows.CANNOT_RUN, 3)])
def test_the_exit_code_says_whether_it_shows(shows: Shows, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 if no version shows it, 1 if one does, 3 if none could run it."""
    monkeypatch.setattr(Script, "run", lambda *_: Showing(shows=shows))
    arguments = ("--torch", HERE, "--python", f"{HERE}={sys.executable}")
    assert run("bisect", "--id", "tensor_parallel_unties", *arguments).exit_code == code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bisect",), "a finding or --id"),
        (("bisect", "abc", "--id", "fsdp1_unties"), "a finding or --id"),
        (
            ("bisect", "--id", "nope", "--torch", "2.13.0"),
            "known issue 'nope' is not valid: it does not exist. Expected one of adafactor_norm_of_shard",
        ),
        (("bisect", "nowhere/abc", "--torch", "2.13.0"), "no such folder"),
        (("bisect", "--id", "tensor_parallel_unties", "--torch", "2.99.0"), "torch version 2.99.0 is not valid: "),
        (("bisect", "abc", "--python", "2.1.0"), "no interpreter"),
        (("replay",), "a finding or --all"),
        (("replay", "abc", "--all"), "a finding or --all"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: tuple[str, ...], words: str) -> None:
    """Exit code 2, nothing on stdout, one line on stderr."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert words in line


def narrow_is_fixed(scenario: Scenario, *, world: str, deadline: float, **options: object) -> Verdict:
    """Find the stored faults, except the one with the narrowest scenario."""
    if scenario.training.model.widths[1] == 1:
        return fakes.fine(scenario, world=world, deadline=deadline)
    return fakes.diverged(scenario, world=world, tensor=f"layers.0.{'norm' if scenario.training.steps == 2 else 'linear'}.weight")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Three findings; the first, about a bias, is fixed."""
    for width, steps, tensor in ((1, 1, "bias"), (3, 1, "linear.weight"), (3, 2, "loss")):
        FindingStore(tmp_path).keep(fakes.diverged(fakes.scenario(width=width, steps=steps), tensor=f"layers.0.{tensor}"))
    return tmp_path


def test_every_finding_of_a_store_is_replayed(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finding gets a line. An unreadable finding is named on stderr, and the others are replayed."""
    monkeypatch.setattr(process, "check_isolated", narrow_is_fixed)
    (store / "broken").mkdir()
    result = run("replay", "--all", "--store", store)
    assert result.exit_code == 1
    *lines, summary = result.stdout.splitlines()
    assert sorted(line.split(": ", 1)[1].split(":")[0].split(" (")[0] for line in lines) == [
        "fails differently",
        "no longer shows, on the torch version with which it was found",
        "still shows",
    ]
    assert summary.startswith("3 findings on torch ")
    assert sorted(summary.split(": ")[1].split(", ")) == ["fails differently 1", "no longer shows 1", "still shows 1"]
    assert "replaying broken, " in result.stderr
    assert "broken finding: " in result.stderr


def test_a_store_in_which_all_is_fixed_is_exit_code_0(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The JSON object has no findings. An empty store gives the same exit code."""
    monkeypatch.setattr(process, "check_isolated", fakes.fine)
    result = run("replay", "--all", "--store", store, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["counts"] == {"no longer shows": 3}
    assert {one["verdict"]["outcome"] for one in found["findings"]} == {"equivalent"}
    empty = run("replay", "--all", "--store", store / "nothing")
    assert (empty.exit_code, empty.stdout) == (0, f"no findings in {store / 'nothing'}\n")
