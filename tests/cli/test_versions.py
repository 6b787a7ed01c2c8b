"""`equivcheck versions` checks each torch version."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from equivcheck.cli import main
from equivcheck.oracle.known_issues import showing
from equivcheck.oracle.known_issues.known import known_issues
from equivcheck.oracle.known_issues.showing import Showing, Shows
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.quality.doctor import Probe
from equivcheck.quality.versions import matrix
from equivcheck.quality.versions.corpus import CorpusResult
from equivcheck.quality.versions.environments import Installation
from equivcheck.quality.versions.matrix import VersionResult
from equivcheck.system.torch_version import installed_torch

HERE = str(installed_torch())
ISSUE = next(issue for issue in known_issues() if issue.id == "adafactor_of_nothing")
ARGUMENTS = ("versions", "--torch", HERE, "--python", f"{HERE}={sys.executable}", "--scenarios", "2", "--issue", ISSUE.id)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write results to the current folder."""
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str, str]:
    """Run the command and return exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as left:
        main([*ARGUMENTS, *more])
    captured = capsys.readouterr()
    return int(str(left.value.code)), captured.out, captured.err


def found(*, outcome: Outcome = Outcome.EQUIVALENT, shows: Shows = Shows.SHOWS) -> VersionResult:
    """Results for a version in tests that run nothing."""
    probe = Probe(world="sim", subject="ddp", works=True, reason="", known="", seconds=1.0)
    checked = (CorpusResult(outcome=Outcome.EQUIVALENT), CorpusResult(outcome=outcome, reason="differs"))
    return VersionResult(torch=HERE, probes=(probe,), corpus=checked, scripts={ISSUE.id: Showing(shows=shows)})


class Measured:
    """Replaces the measurement."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, result: VersionResult) -> None:
        self.result, self.times = result, 0
        monkeypatch.setattr(matrix, "measure_version", self)

    def __call__(self, installation: Installation, *_: object) -> VersionResult:
        """Return the prepared result."""
        assert installation.torch.startswith(HERE)
        self.times += 1
        return self.result


@pytest.mark.slow
def test_the_installed_version_works(capsys: pytest.CaptureFixture[str]) -> None:
    """Doctor, two scenarios and a script really run. The second time, nothing is left to do."""
    code, out, err = run(capsys)
    again, same, told = run(capsys)
    assert (code, again) == (0, 0), out + err
    assert f"torch {HERE}: 1 of 1 scripts show their issue" in err
    assert "in matrix.json; --again runs it again" in told
    assert same == out
    kept = json.loads(Path("matrix.json").read_text("utf-8"))["versions"][HERE]
    assert all(probe["works"] or "(torch <" in probe["reason"] for probe in kept["probes"])
    assert len(kept["corpus"]) == 2


@pytest.mark.parametrize(
    ("result", "code", "line"),
    [
        (found(), 0, ""),
        (found(outcome=Outcome.KNOWN), 0, ""),
        (found(outcome=Outcome.DIVERGED), 1, "1 diverged: differs"),
        (found(outcome=Outcome.HUNG), 1, "1 hung: differs"),
        (found(shows=Shows.DOES_NOT), 1, f"script {ISSUE.id}: does not, but the known issue is listed for torch {ISSUE.torch}"),
    ],
)
def test_findings_and_scripts_that_disagree_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, result: VersionResult, code: int, line: str
) -> None:
    """They give exit code 1 and a line each."""
    Measured(monkeypatch, result)
    left, out, _ = run(capsys)
    assert left == code
    assert f"torch {HERE}: {line}" in out if line else f"torch {HERE}" not in out


def test_only_the_same_question_is_not_asked_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another seed, other code or `--again` measure again, and so does a damaged file."""
    measured = Measured(monkeypatch, found())
    for more in ((), (), ("--seed", "2"), ("--seed", "2"), ("--seed", "2", "--again")):
        run(capsys, *more)
    assert measured.times == 3
    monkeypatch.setattr(matrix, "code_digest", lambda: "other")
    run(capsys)
    assert measured.times == 4
    Path("matrix.json").write_text("{", "utf-8")
    run(capsys)
    assert measured.times == 5


def test_the_table_of_known_issues_takes_what_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Other entries stay. If it is no checkout, nothing runs."""
    before, measured = showing.measured_results(), Measured(monkeypatch, found(shows=Shows.DOES_NOT))
    table = tmp_path / "equivcheck" / "oracle" / "known_issues" / "shows.toml"
    table.parent.mkdir(parents=True)
    monkeypatch.setattr(showing, "table_path", lambda: table)
    code, _, err = run(capsys, "--write-shows")
    assert (code, measured.times) == (2, 0)
    assert "Expected a source checkout" in err
    (tmp_path / "pyproject.toml").touch()
    run(capsys, "--write-shows")
    now = showing.read_table(table.read_text("utf-8"))
    assert now == before | {ISSUE.id: before[ISSUE.id] | {HERE: Showing(shows=Shows.DOES_NOT)}}


def test_json_has_every_result(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stdout has the same object as the file."""
    Measured(monkeypatch, found())
    _, out, _ = run(capsys, "--json")
    assert json.loads(out) == json.loads(Path("matrix.json").read_text("utf-8"))


def test_an_issue_that_does_not_exist_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """The error lists known issues; the exit code is 2."""
    code, _, err = run(capsys, "--issue", "fsdp9")
    assert code == 2
    assert "known issue 'fsdp9' is not valid: it does not exist. Expected one of adafactor_norm_of_shard, " in err
