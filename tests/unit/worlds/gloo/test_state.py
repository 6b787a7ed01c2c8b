"""State changed in kept processes is restored, or the processes are replaced."""

from __future__ import annotations

import pytest

from equivcheck.worlds.gloo.world import GlooRanks
from isolation.mutations import mutate
from unit.worlds.gloo import programs


@pytest.mark.parametrize(
    ("name", "kept"),
    [("grad mode", True), ("module hook", True), ("environment", True), ("function", False), ("default group", False)],
)
def test_processes_are_replaced_only_where_they_must_be(ranks: GlooRanks, name: str, kept: bool) -> None:
    """Restorable state does not need new processes; a replaced function of torch does."""
    before = ranks.run(programs.process).values
    ranks.run(mutate, (name,), "returns")
    assert (ranks.run(programs.process).values == before) is kept


def test_processes_are_kept_after_their_first_compilation(ranks: GlooRanks) -> None:
    """Torch wraps methods of all optimizers then, and never again in these processes."""
    before = ranks.run(programs.process).values
    assert ranks.run(programs.first_compilation).values == (True, True)
    assert ranks.run(programs.process).values == before
    assert ranks.run(programs.first_compilation).values == (False, False)


def test_random_numbers_are_the_same_in_new_processes(ranks: GlooRanks) -> None:
    """Ranks draw from `random` and NumPy this rank's usual numbers."""
    first = ranks.run(programs.drawn).values
    ranks.run(mutate, ("function",), "returns")
    assert ranks.run(programs.drawn).values == first
    assert first[0] != first[1]
