"""Rules for every strategy."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

import equivcheck.programs.nouns as program_nouns
from equivcheck import scenario, strategies
from equivcheck.errors import UsageError
from equivcheck.layouts.base.kind import LayoutKind
from equivcheck.scenario import Parallelism
from equivcheck.strategies import layouts
from equivcheck.strategies import parallelism as module
from equivcheck.strategies.parallelism import parallelisms_of

NAMES = strategies.__all__
NOUNS = {**vars(scenario), **vars(program_nouns)}
"""Classes in drawn values, by name."""


def test_importing_the_strategies_leaves_torch_alone() -> None:
    """Collecting tests is quick, and drawing needs no torch either."""
    program = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "from equivcheck.strategies import scenarios\n"
        "scenarios().example()\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=600, check=False).returncode == 0


@pytest.mark.parametrize("name", NAMES)
def test_options_are_by_keyword_with_defaults(name: str) -> None:
    """All strategies can be called without arguments, and take options by keyword."""
    parameters = inspect.signature(getattr(strategies, name)).parameters.values()
    assert all(parameter.kind is parameter.KEYWORD_ONLY and parameter.default is not parameter.empty for parameter in parameters)


@pytest.mark.parametrize("name", NAMES)
def test_reprs_evaluate(name: str) -> None:
    """A strategy is printed as the code that makes it."""
    strategy = getattr(strategies, name)()
    again = eval(repr(strategy), {**NOUNS, "builds": st.builds, **vars(strategies)})
    assert isinstance(again, SearchStrategy)
    assert repr(again) == repr(strategy)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_drawn_prints_as_code(name: str) -> None:
    """Drawn values can be pasted into a test."""

    @settings(max_examples=50, deadline=None, database=None)
    @given(getattr(strategies, name)())
    def holds(noun: object) -> None:
        assert eval(repr(noun), dict(NOUNS)) == noun

    holds()


def test_an_unknown_tag_lists_those_that_exist() -> None:
    """A misspelt layout gives a clear error."""
    with pytest.raises(UsageError, match=r"layout 'ddpp' is not valid: .* Did you mean ddp\? Expected one of ddp, replicate"):
        find_any(layouts(tags=("ddpp",)))


def find_any(strategy: SearchStrategy[object]) -> None:
    """Draw one example."""

    @settings(max_examples=1, deadline=None, database=None)
    @given(strategy)
    def draw(_: object) -> None:
        pass

    draw()


class Pace(Enum):
    """An option in a third-party parallelism."""

    SLOW = "slow"
    FAST = "fast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Local(Parallelism):
    """A third-party parallelism."""

    tag: ClassVar[str] = "local"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = (("dp",),)
    pace: Pace = Pace.SLOW
    lazy: bool = False
    every: int = 1


class Kind(LayoutKind[Local]):
    """A kind without a strategy."""

    parallelism = Local

    def apply(self, setup: object, parallelism: Local, mesh: object) -> None:
        """Never called."""


class OwnKind(Kind):
    """A kind with a strategy."""

    def strategy(self) -> SearchStrategy[Local]:
        """The kind's own strategy."""
        return st.just(Local(every=7))


def drawn_from(kind: LayoutKind, monkeypatch: pytest.MonkeyPatch) -> set[Local]:
    """Draw from a third-party kind."""
    monkeypatch.setattr(module, "layout_kinds", lambda: {"local": kind})
    parallelisms_of.cache_clear()
    found: set[Local] = set()

    @settings(max_examples=100, deadline=None, database=None)
    @given(parallelisms_of("local"))
    def collect(parallelism: Local) -> None:
        found.add(parallelism)

    collect()
    parallelisms_of.cache_clear()
    return found


def test_a_third_partys_parallelism_is_drawn_by_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enums and booleans take every value, other fields their default."""
    assert drawn_from(Kind(), monkeypatch) == {Local(pace=pace, lazy=lazy) for pace in Pace for lazy in (False, True)}


def test_a_third_partys_own_strategy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind's own strategy has priority."""
    assert drawn_from(OwnKind(), monkeypatch) == {Local(every=7)}
