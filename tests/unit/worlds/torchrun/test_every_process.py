"""Observations of torchrun's processes, started here with torchrun's variables."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from equivcheck import check
from equivcheck.export.forked import run_forked
from equivcheck.mutants.registry import mutant
from unit.worlds.torchrun import programs

SCRIPTS = Path(__file__).parent


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Observations in each of two processes."""
    code, printed = run_forked(SCRIPTS / "every_process.py", 2, tmp_path_factory.mktemp("printed"), 600.0)
    assert code == 0, printed
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert [each["rank"] for each in found] == [0, 1]
    return found


def both(seen: list[dict[str, Any]], name: str) -> Any:
    """Observation shared by both processes."""
    first, second = (each[name] for each in seen)
    assert first == second
    return first


def test_every_process_has_all_values(seen: list[dict[str, Any]]) -> None:
    """The program ran on each rank in one group, and values come in rank order."""
    assert both(seen, "values") == [[0, 1], [1, 1]]


def test_state_is_put_back(seen: list[dict[str, Any]]) -> None:
    """Changed state is restored, and a group created by the world ends with it."""
    assert both(seen, "state is as it was")
    assert both(seen, "group has ended")


def test_a_group_of_the_script_is_used(seen: list[dict[str, Any]]) -> None:
    """Ranks communicate over the script's group, and it stays."""
    assert both(seen, "group is the script's")
    assert both(seen, "group is left")


def test_a_check_finds_what_it_finds_elsewhere(seen: list[dict[str, Any]]) -> None:
    """A correct scenario is equivalent, and a planted bug diverges at the same place with the same values in every process."""
    assert both(seen, "equivalent") == ["equivalent", "torchrun"]
    elsewhere = check(programs.scenario(2), alter=mutant("gradients_summed").plant)
    assert both(seen, "planted") == [elsewhere.outcome.value, repr(elsewhere.divergence)]


def test_a_tensor_program_is_judged_once(seen: list[dict[str, Any]]) -> None:
    """Rank 0 judges: its time is in every process's verdict."""
    assert both(seen, "tensor program")[0] == "equivalent"


def test_a_training_of_a_user_is_that_of_rank_0(seen: list[dict[str, Any]]) -> None:
    """Data that each process draws for itself has no effect."""
    assert both(seen, "training of a user") == "equivalent"


def test_a_world_of_another_size_is_refused(seen: list[dict[str, Any]]) -> None:
    """The line names the actual and the required number of ranks."""
    expected = "size 4 is not valid: world torchrun has 2 ranks. Expected a torchrun command in which --nnodes"
    assert both(seen, "too small").startswith(expected)


def test_a_rank_that_raises_is_told_with_its_host(seen: list[dict[str, Any]]) -> None:
    """Every process gets the error; it is the last run, so the next fails at once with the same error."""
    host = socket.gethostname()
    assert both(seen, "failures") == [f"rank 1 raised ValueError: boom on {host} (on host {host})"] * 2


@pytest.mark.slow
def test_no_rank_waits_for_ever(tmp_path: Path) -> None:
    """If ranks wait for each other in vain, every process gets each rank's state, and ends."""
    code, printed = run_forked(SCRIPTS / "waiting.py", 2, tmp_path, 600.0)
    host = socket.gethostname()
    expected = f"idle for 2 s: rank 0 waiting in barrier, rank 1 finished (on host {host}: 0, 1) ['barrier', '']"
    assert (code, printed.splitlines()) == (0, [expected] * 2)
