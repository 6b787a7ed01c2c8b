"""A corpus is the same for every version, and what is wrong with one scenario is told of that one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.quality.versions import corpus
from equivcheck.quality.versions.corpus import CorpusResult, draw_scenarios
from equivcheck.scenario import Scenario
from equivcheck.scenario.file_format.codec import to_json


@pytest.fixture(scope="module")
def four() -> tuple[Scenario, ...]:
    """A corpus, drawn when all modules have been imported: Hypothesis draws constants of those that are not installed."""
    draw_scenarios(1, seed=5)
    return draw_scenarios(4, seed=5)


def test_a_seed_draws_the_same_scenarios(four: tuple[Scenario, ...]) -> None:
    """Different from each other, none compiled, and more of them begin with the same."""
    assert draw_scenarios(4, seed=5) == four
    assert draw_scenarios(12, seed=5)[:4] == four
    assert draw_scenarios(4, seed=6) != four
    assert len(set(draw_scenarios(12, seed=5))) == 12
    assert not any(layout.execution.is_compiled for scenario in draw_scenarios(12, seed=5) for layout in scenario.layouts)


def test_what_the_checker_raises_is_told_of_its_scenario(
    four: tuple[Scenario, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others are checked."""

    def check(scenario: Scenario, **_: object) -> CorpusResult:
        if scenario == four[0]:
            raise OSError("no threads")
        return CorpusResult(outcome=Outcome.EQUIVALENT)

    monkeypatch.setattr("equivcheck.checking.check.check", check)
    (tmp_path / "tasks.jsonl").write_text("".join(f"{to_json(scenario)}\n" for scenario in four), "utf-8")
    results = tmp_path / "results.jsonl"
    results.touch()
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path)])
    corpus.main()
    first, *others = results.read_text("utf-8").splitlines()
    assert "the checker raised OSError: no threads" in first
    assert len(others) == 3
    assert all('"equivalent"' in line for line in others)
