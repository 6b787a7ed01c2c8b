"""Adding up what came of mutants, and telling it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from equivcheck.errors import UsageError
from equivcheck.mutants.mutant import Family, Minimum
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.quality.selftest.examine import Effort
from equivcheck.quality.selftest.result import MutantResult, SelftestResult, ShrunkScenario
from equivcheck.report.selftest_text import mutant_line, print_selftest, selftest_object
from unit.campaign import fakes

SHRUNK = ShrunkScenario(
    scenario=fakes.scenario(ranks=3, layers=2, steps=2),
    outcome=Outcome.DIVERGED,
    minimum=Minimum(because="a single rank sums nothing"),
    options=("optimizer AdamW",),
    seconds=1.0,
    checks=9,
)
KILLED = MutantResult(
    name="killed",
    family=Family.DATA_PARALLEL,
    drawn=9,
    reachable=6,
    caught=4,
    undecided=2,
    examples=3,
    expected=(Cause.SUMMED, Cause.SCALED),
    given=Diagnosis(cause=Cause.SCALED, sentence="twice as large", exact=False),
    shrunk=SHRUNK,
)
SURVIVES = MutantResult(
    name="survives", family=Family.CLIPPING, drawn=200, reachable=4, expected=(Cause.NOT_CLIPPED,), survivor=fakes.scenario()
)
UNREACHED = MutantResult(name="unreached", family=Family.RUNTIME, drawn=200, expected=(Cause.CALLS_DIFFER,))
FOUND = SelftestResult(rows=(KILLED, SURVIVES, UNREACHED), asked=3, seed=7, seconds=12.0)


def test_rates_are_shares_of_what_they_say() -> None:
    """Reached of all, killed of reached, right diagnoses of killed, and scenarios caught of those that could be."""
    assert FOUND.reached_rate == pytest.approx(2 / 3)
    assert FOUND.kill_rate == pytest.approx(1 / 2)
    assert FOUND.caught_rate == pytest.approx(4 / 8)
    assert FOUND.diagnosis_rate == 1.0
    assert (FOUND.median_examples, FOUND.worst_examples, FOUND.num_small) == (3, 3, 1)
    assert (KILLED.num_missed, SURVIVES.num_missed) == (0, 4)
    nothing = replace(FOUND, rows=())
    assert (nothing.reached_rate, nothing.kill_rate, nothing.caught_rate, nothing.diagnosis_rate) == (0.0, 0.0, 0.0, 0.0)


def test_only_all_of_the_mutants_pass() -> None:
    """One that is not reached, survives, was broken off or was not examined fails the selftest."""
    assert replace(FOUND, rows=(KILLED,), asked=1).is_passed
    for rows in ((KILLED, SURVIVES), (KILLED, UNREACHED), (KILLED, replace(KILLED, broken="it died")), (KILLED,)):
        assert not replace(FOUND, rows=rows, asked=2).is_passed


@pytest.mark.parametrize(("ranks", "layers", "steps"), [(4, 1, 1), (2, 3, 1), (2, 1, 3)])
def test_small_is_one_more_than_the_least(ranks: int, layers: int, steps: int) -> None:
    """Two ranks, layers or steps too many are not small, one of each is."""
    assert SHRUNK.is_small
    assert not replace(SHRUNK, scenario=fakes.scenario(ranks=ranks, layers=layers, steps=steps)).is_small


def test_a_wrong_diagnosis_is_none() -> None:
    """A diagnosis counts if it is among those that are right."""
    assert KILLED.is_explained
    assert not replace(KILLED, expected=(Cause.SUMMED,)).is_explained
    assert not replace(KILLED, given=None).is_explained


def test_what_is_wrong_with_the_checker_is_told() -> None:
    """The table names every mutant; survivors, what was not reached and what was broken off have a line each."""
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as capture:
        print_selftest(console, replace(FOUND, rows=(*FOUND.rows, replace(UNREACHED, name="broken", broken="it died"))))
    text = capture.get()
    assert "survives was not caught in: ddp on 2 ranks" in text
    assert "unreached had no effect in 200 examples" in text
    assert "broken was not completed: it died" in text
    assert "3 ranks, 2 layers (1-1-1), 2 steps" in text
    assert "scaled" in text
    assert mutant_line(KILLED).startswith("killed: caught in 4 of 6, first after 3 examples")


def test_the_object_has_every_field_that_programs_read() -> None:
    """Mutants and rates by the names that are documented; what there is not is null."""
    found = selftest_object(FOUND)
    assert {"mutants", "kill_rate", "reached_rate", "diagnosis_rate", "median_examples", "worst_examples"} <= set(found)
    killed, survives, unreached = found["mutants"]
    assert (killed["reachable"], killed["caught"], killed["undecided"], killed["examples"]) == (6, 4, 2, 3)
    assert killed["shrunk"]["widths"] == [1, 1, 1]
    assert killed["shrunk"]["minimum"] == {"ranks": 2, "layers": 1, "steps": 1, "because": "a single rank sums nothing"}
    assert (killed["diagnosis_expected"], killed["diagnosis_given"], killed["diagnosis_right"]) == ("summed", "scaled", True)
    assert survives["shrunk"] is survives["examples"] is survives["diagnosis_given"] is None
    assert survives["survivor"]["layout"]
    assert unreached["survivor"] is None


@pytest.mark.parametrize("change", [{"seed": -1}, {"examples": 0}, {"examples": 501}, {"seconds": 0.0}], ids=str)
def test_an_effort_that_cannot_be_made_is_refused(change: dict[str, float]) -> None:
    """The error is one line that names the field and what is allowed."""
    with pytest.raises(UsageError, match=r"^Effort\.\w+ .* is not valid: .*\. Expected .*$"):
        Effort(**change)  # type: ignore[arg-type]
