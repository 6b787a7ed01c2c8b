"""The command ``export``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from equivcheck import check
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.workers import process
from equivcheck.cli import main
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.scenario import Resume, Scenario
from equivcheck.scenario.file_format.codec import to_json
from equivcheck.system.commands import FinishedCommand
from unit.campaign import fakes


def run(*arguments: object, stdin: str | None = None) -> Result:
    """Run a command line."""
    return CliRunner().invoke(main, ["export", *(str(argument) for argument in arguments)], input=stdin)


@pytest.fixture(autouse=True)
def _check_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check in this process, because a new one takes longer."""
    monkeypatch.setattr(process, "check_isolated", lambda scenario, *, world, deadline: check(scenario, world=world))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with one finding."""
    FindingStore(tmp_path / "store").keep(fakes.diverged(fakes.scenario(ranks=2)))
    return tmp_path / "store"


def test_a_finding_is_written_to_stdout(store: Path) -> None:
    """The script's docstring has the difference, the torch version and the command."""
    (mark,) = FindingStore(store).fingerprints()

    result = run(mark[:4], "--store", store)

    assert result.exit_code == 0, result.output
    assert "First divergence: " in result.stdout
    assert "torchrun --standalone --nproc-per-node 2 repro.py" in result.stdout
    assert "import equivcheck" not in result.stdout
    compile(result.stdout, "repro.py", "exec")


def test_a_file_takes_the_script_and_names_it(store: Path, tmp_path: Path) -> None:
    """`-o` writes the file and prints nothing; the script's command has the file's name."""
    (mark,) = FindingStore(store).fingerprints()
    output = tmp_path / "issue_1.py"

    result = run(store / mark, "-o", output)

    assert (result.exit_code, result.stdout) == (0, "")
    assert "--nproc-per-node 2 issue_1.py" in output.read_text("utf-8")


def test_a_scenario_is_checked_first() -> None:
    """The JSON object has the outcome for a scenario from standard input."""
    result = run("-", "--json", stdin=to_json(fakes.scenario(ranks=2)))

    written = json.loads(result.stdout)
    assert written["outcome"] == Outcome.EQUIVALENT.value
    assert (written["ranks"], written["exit_code"]) == (2, None)
    assert written["lines"] == written["script"].count("\n")
    assert "and on one device" in written["script"]


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1)])
def test_a_run_prints_what_the_script_prints(code: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--run` prints the script's output and exit code; a difference gives exit code 1."""
    ran: list[int] = []

    def launch(text: str, ranks: int, *, name: str) -> FinishedCommand:
        ran.append(ranks)
        return FinishedCommand(code=code, printed="step 0 loss: max difference 0.5\n", errors="noise of torchrun")

    monkeypatch.setattr("equivcheck.export.launch.launch", launch)

    result = run("-", "--run", stdin=to_json(fakes.scenario(ranks=2)))

    assert (result.exit_code, ran) == (expected, [2])
    assert result.stdout == f"step 0 loss: max difference 0.5\nexit code {code}\n"


def resumed() -> Scenario:
    """A scenario that starts under another layout."""
    scenario = fakes.scenario(ranks=2)
    training = replace(scenario.training, steps=2)
    return replace(scenario, training=training, resume=Resume(layout=scenario.layout))


@pytest.mark.parametrize(
    ("arguments", "scenario", "words"),
    [
        ((), resumed(), "Scenario.resume cannot be exported"),
        (("-o", "/no/such/folder/x.py"), fakes.scenario(), "cannot be written"),
    ],
    ids=["option", "no folder"],
)
def test_what_cannot_be_written_is_named_in_a_line(arguments: tuple[str, ...], scenario: Scenario, words: str) -> None:
    """Exit code 2, one line on stderr, an empty stdout."""
    result = run("-", *arguments, stdin=to_json(scenario))

    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
