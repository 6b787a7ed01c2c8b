"""What tells that something shows on a version of torch."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from equivcheck.campaign.findings.finding import Finding, verdict_object
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.findings.versions import Method
from equivcheck.oracle.known_issues.showing import Showing, Shows
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.quality.versions import measuring, scripts
from equivcheck.quality.versions.environments import Environments, Installation
from equivcheck.quality.versions.measuring import Search
from equivcheck.quality.versions.scripts import Script, of_finding
from equivcheck.scenario import Resume
from equivcheck.system.commands import FinishedCommand
from equivcheck.worlds.failure import Failure, FailureKind, RankReport, RankState
from equivcheck.worlds.trace.differences import Phase
from unit.campaign.fakes import diverged, scenario

HERE = Installation(torch=version("torch"), python=Path(sys.executable))
DIVERGED = diverged(scenario(width=3))
RAISED = Failure(
    kind=FailureKind.RAISED,
    summary="rank 0 raised",
    reports=(RankReport(rank=0, state=RankState.RAISED, error="RuntimeError: 3 shards at 0x7f00, caused by ValueError: 2"),),
)
CRASHED = replace(DIVERGED, outcome=Outcome.CRASHED, divergence=None, failure=RAISED)


def finding(verdict: Verdict, folder: Path) -> Finding:
    """A finding in a store."""
    store = FindingStore(folder)
    store.keep(verdict)
    return store.load(store.fingerprints()[0])


def judged(verdict: Verdict, folder: Path, code: int, printed: str) -> str:
    """What the script of a finding is taken to show."""
    script = of_finding(finding(verdict, folder))
    assert script is not None
    return str(script.judge(code, printed))


@pytest.mark.parametrize(
    ("code", "printed", "answer"),
    [
        (1, "step 0 loss: max difference 0.0\nstep 0 gradient 0.weight: max difference 0.5\n", "shows"),
        (1, "step 0 gradient 0.weight: max difference nan\n", "shows"),
        (1, "step 0 gradient 0.weight: max difference 1e-17\nstep 0 gradient 0.bias: max difference 0.5\n", "cannot run: step 0"),
        (1, "Traceback\nImportError: cannot import name 'ScheduleDualPipeV'\n", "cannot run: ImportError: cannot import name"),
        (0, "step 0 gradient 0.weight: max difference 0.0\n", "does not"),
    ],
)
def test_a_script_shows_a_difference_where_it_was_found(tmp_path: Path, code: int, printed: str, answer: str) -> None:
    """Exit code 1, and the tensor that differed first differs beyond the tolerance; another error is another thing."""
    assert judged(DIVERGED, tmp_path, code, printed).startswith(answer)


@pytest.mark.parametrize(
    ("printed", "answer"),
    [("RuntimeError: 12 shards at 0x55aa\n", "shows"), ("RuntimeError: no such operator\n", "cannot run: RuntimeError: no such")],
)
def test_a_script_shows_the_error_that_was_found(tmp_path: Path, printed: str, answer: str) -> None:
    """But for numbers and addresses; any other error is not the finding."""
    assert judged(CRASHED, tmp_path, 1, printed).startswith(answer)


def test_what_a_script_cannot_show_has_none(tmp_path: Path) -> None:
    """A divergence of calls, a checkpoint between layouts, and a hang are left to replay."""
    training = replace(DIVERGED.scenario.training, steps=2)
    resumed = replace(DIVERGED.scenario, training=training, resume=Resume(layout=DIVERGED.scenario.layout))
    assert DIVERGED.divergence is not None
    for number, verdict in enumerate(
        (
            replace(DIVERGED, divergence=replace(DIVERGED.divergence, phase=Phase.COMMUNICATION)),
            replace(DIVERGED, scenario=resumed),
            replace(CRASHED, outcome=Outcome.HUNG, failure=replace(RAISED, kind=FailureKind.DEADLOCK)),
        )
    ):
        assert of_finding(finding(verdict, tmp_path / str(number))) is None


@pytest.mark.slow
def test_a_script_past_its_limit_is_no_answer() -> None:
    """It cannot run, with the limit."""
    script = Script(text="import time; time.sleep(600)", ranks=1, judge=lambda *_: Showing(shows=Shows.SHOWS))
    assert str(script.run(HERE, 2.0)) == "cannot run: did not finish within 2 s"


def search(*versions: str, told: list[str] | None = None) -> Search:
    """A search in environments that are not there."""
    there = tuple(map(Version, versions))
    given = {version: Installation(torch=str(version), python=Path(str(version))) for version in there}
    environments = Environments(given=given, cache=Path("nowhere"), tell=(told if told is not None else []).append)
    return Search(versions=there, environments=environments, seconds=60.0)


def test_a_script_that_does_not_show_it_gives_way_to_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What replays find is told in the same terms; one that cannot run says why."""
    fine = replace(DIVERGED, outcome=Outcome.EQUIVALENT, reason="", divergence=None)
    answers = {"2.9.1": fine, "2.11.0": DIVERGED, "2.12.1": replace(DIVERGED, outcome=Outcome.KNOWN, known="some_issue")}

    def replay(python: Path, command: tuple[str, ...], *, seconds: float) -> FinishedCommand:
        assert command[:3] == ("-m", "equivcheck", "replay")
        if str(python) not in answers:
            return FinishedCommand(code=3, printed="", errors="a remark\nerror: no world")
        return FinishedCommand(code=0, printed=json.dumps({"verdict": verdict_object(answers[str(python)])}), errors="")

    monkeypatch.setattr(measuring, "run_python", replay)
    monkeypatch.setattr(Script, "run", lambda *_: Showing(shows=Shows.DOES_NOT))
    told: list[str] = []
    found = search("2.9.1", "2.10.0", "2.11.0", "2.12.1", told=told).of_finding(finding(DIVERGED, tmp_path))
    assert found.by is Method.REPLAY
    assert "no version shows it by script, so the finding is replayed" in told
    assert {one.torch: str(one.showing) for one in found.measured} == {
        "2.9.1": "does not",
        "2.10.0": "cannot run: error: no world",
        "2.11.0": "shows",
        "2.12.1": "shows: the known issue some_issue",
    }


def test_the_version_that_it_was_found_with_is_measured_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the script must show it, so that other versions can be told by it."""
    asked: list[str] = []

    def run_nothing(_script: Script, installation: Installation, _seconds: float) -> Showing:
        asked.append(installation.torch)
        return Showing(shows=Shows.SHOWS if installation.torch != "2.1.0" else Shows.DOES_NOT)

    monkeypatch.setattr(scripts.Script, "run", run_nothing)
    here = str(HERE.version)
    found = search("2.1.0", here, "2.99.0").of_finding(finding(DIVERGED, tmp_path))
    assert (found.by, asked) == (Method.SCRIPT, [here, "2.1.0", "2.99.0"])
    assert str(found) == f"begins in {here}, still shows in 2.99.0"
