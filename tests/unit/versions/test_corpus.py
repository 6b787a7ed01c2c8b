"""A corpus is the same for every version, and its results come back from the other interpreter, whatever happens there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from equivcheck.scenario.file_format.codec import from_json
from equivcheck.torch_version import installed_torch
from equivcheck.verdict.verdict import Outcome
from equivcheck.versions import corpus
from equivcheck.versions.corpus import Checked, checked, drawn
from equivcheck.versions.environments import Installation
from equivcheck.versions.process import Ran

HERE = Installation(torch=str(installed_torch()), python=Path(sys.executable))
FOUR = drawn(4, seed=5)


def test_a_seed_draws_the_same_scenarios() -> None:
    """Different from each other, none compiled, and more of them begin with the same."""
    assert drawn(4, seed=5) == FOUR
    assert drawn(12, seed=5)[:4] == FOUR
    assert drawn(4, seed=6) != FOUR
    assert len(set(drawn(12, seed=5))) == 12
    assert not any(layout.execution.is_compiled for scenario in drawn(12, seed=5) for layout in scenario.layouts)


def test_a_process_that_ends_costs_one_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    """That one has crashed, or hung, and the next process goes on after it."""
    runs = iter([Ran(code=-11, printed="", errors="boom"), Ran(code=None, printed="", errors="")])
    monkeypatch.setattr(corpus, "run_python", lambda _python, arguments, seconds: one_more(arguments, next(runs)))
    found = checked(HERE, FOUR)
    assert [result.outcome for result in found] == [Outcome.EQUIVALENT, Outcome.CRASHED, Outcome.EQUIVALENT, Outcome.HUNG]
    assert found[1].reason == "the process ended with exit code -11: boom"


def test_a_process_that_never_starts_is_not_tried_for_each_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left has crashed, too, and says that it was not run."""
    tried = []
    monkeypatch.setattr(
        corpus, "run_python", lambda *_, **__: tried.append(1) or Ran(code=1, printed="", errors="ImportError: x")
    )
    found = checked(HERE, FOUR)
    assert len(tried) == 3
    assert {result.outcome for result in found} == {Outcome.CRASHED}
    assert [result.reason.partition(":")[0] for result in found] == ["the process ended with exit code 1"] * 3 + ["not run"]


def test_what_the_checker_raises_is_told_of_its_scenario(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The others are checked."""
    monkeypatch.setattr("equivcheck.oracle.check.check", fails_at_first(FOUR[0]))
    file, results = tmp_path / "corpus", tmp_path / "results"
    file.write_text("".join(f"{corpus.to_json(scenario)}\n" for scenario in FOUR), "utf-8")
    results.touch()
    monkeypatch.setattr(sys, "argv", ["", str(file), str(results)])
    corpus.main()
    first, *others = results.read_text("utf-8").splitlines()
    assert "the checker raised OSError: no threads" in first
    assert len(others) == 3
    assert all('"equivalent"' in line for line in others)


def fails_at_first(first: object) -> object:
    """A check that finds nothing, but for one scenario."""

    def check(scenario: object, **_: object) -> Checked:
        if scenario == first:
            raise OSError("no threads")
        return Checked(outcome=Outcome.EQUIVALENT)

    return check


def one_more(arguments: Sequence[str], ran: Ran) -> Ran:
    """A process that checks one scenario and ends."""
    *_, file, results = arguments
    assert from_json(Path(file).read_text("utf-8").splitlines()[0]) == FOUR[0]
    corpus._write(Path(results), Checked(outcome=Outcome.EQUIVALENT))
    return ran
