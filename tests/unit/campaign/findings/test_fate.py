"""What becomes of a finding on another version of torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from equivcheck.campaign.findings.fate import Fate, replayed
from equivcheck.campaign.findings.finding import Finding, load_finding, write_versions
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.findings.versions import Method, ShownIn, VersionAnswer
from equivcheck.oracle.known_issues.showing import Showing, Shows
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from unit.campaign.fakes import diverged, scenario

VERDICT = diverged(scenario(width=3))
FINE = Verdict(outcome=Outcome.EQUIVALENT, scenario=VERDICT.scenario, world="sim")


@pytest.fixture
def finding(tmp_path: Path) -> Finding:
    """A finding of torch 2.13.0."""
    store = FindingStore(tmp_path)
    store.keep(VERDICT)
    kept = load_finding(store.folder(store.fingerprints()[0]))
    return replace(kept, environment=replace(kept.environment, torch="2.13.0+cpu"))


def shown_in(**answers: bool) -> ShownIn:
    """The result of a bisection: ``v2_9_1=False``."""
    shows = {True: Shows.SHOWS, False: Shows.DOES_NOT}
    measured = {name[1:].replace("_", "."): Showing(shows=shows[answer]) for name, answer in answers.items()}
    return ShownIn(
        by=Method.SCRIPT,
        versions=tuple(measured),
        measured=tuple(VersionAnswer(torch=torch, showing=showing) for torch, showing in measured.items()),
    )


@pytest.mark.parametrize(
    ("torch", "verdict", "fate", "words"),
    [
        ("2.14.1", VERDICT, Fate.STILL, "still shows"),
        ("2.14.1", FINE, Fate.GONE, "no longer shows: fixed between 2.13.0 and 2.14.1"),
        ("2.11.0", FINE, Fate.NOT_YET, "does not show yet: begins between 2.11.0 and 2.13.0"),
        ("2.13.0", FINE, Fate.GONE, "no longer shows, on the torch version with which it was found"),
        ("2.14.1", diverged(VERDICT.scenario, tensor="loss"), Fate.DIFFERENTLY, "fails differently: diverged: loss differs"),
        ("2.14.1", replace(VERDICT, outcome=Outcome.KNOWN, known="some_issue"), Fate.KNOWN, "still shows, known as some_issue"),
        (
            "2.14.1",
            replace(FINE, outcome=Outcome.UNSUPPORTED, reason="torch has none"),
            Fate.UNTOLD,
            "cannot tell: unsupported: torch has none",
        ),
        (
            "2.14.1",
            replace(FINE, undecided="nothing from step 1 on"),
            Fate.UNTOLD,
            "cannot tell: equivalent: nothing from step 1 on",
        ),
    ],
)
def test_versions_say_what_became_of_it(finding: Finding, torch: str, verdict: Verdict, fate: Fate, words: str) -> None:
    """By the version that it was found with and the one that is installed; what proves nothing is not called fixed."""
    found = replayed(finding, verdict, torch)
    assert (found.fate, found.words) == (fate, words)


def test_a_bisection_says_it_to_the_version(finding: Finding) -> None:
    """Where a bisection has told in which version it ends, or that the version before this one is free of it."""
    bisected = replace(finding, shown_in=shown_in(v2_9_1=False, v2_13_0=True, v2_14_1=False, v2_15_0=False))
    assert replayed(bisected, FINE, "2.15.0").words == "no longer shows: fixed in 2.14.1"
    assert replayed(bisected, FINE, "2.9.1+cpu").words == "does not show yet: begins in 2.13.0"
    assert replayed(bisected, VERDICT, "2.15.0").words == "new here: does not show in 2.14.1"
    assert replayed(bisected, VERDICT, "2.13.0").fate is Fate.NEW


def test_versions_are_kept_in_the_folder(finding: Finding) -> None:
    """They read back with the finding, its README tells them, and they outlast a verdict that says more of the same scenario."""
    assert "equivcheck bisect " in (finding.path / "README.md").read_text("utf-8")
    found = shown_in(v2_9_1=False, v2_13_0=True)
    write_versions(finding, found)
    assert load_finding(finding.path).shown_in == found
    assert "torch 2.9.1 to 2.13.0, it begins in 2.13.0, still shows in 2.13.0" in (finding.path / "README.md").read_text("utf-8")
    FindingStore(finding.path.parent).keep(replace(VERDICT, confirmed="diverged on gloo too"))
    assert load_finding(finding.path).verdict.confirmed
    assert load_finding(finding.path).shown_in == found


def test_versions_of_another_scenario_are_dropped(finding: Finding) -> None:
    """A smaller scenario that replaces a finding has not been bisected, nor may an older bisection be written into it."""
    write_versions(finding, shown_in(v2_9_1=False, v2_13_0=True))
    FindingStore(finding.path.parent).keep(diverged(scenario(width=1)))
    assert load_finding(finding.path).shown_in is None
    with pytest.raises(ValueError, match="changed during the bisection"):
        write_versions(finding, shown_in(v2_9_1=False, v2_13_0=True))
