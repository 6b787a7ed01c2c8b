"""What processes that torchrun starts see of the world that they make up: started here without it, by what it sets."""

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
    """By each of two processes."""
    code, printed = run_forked(SCRIPTS / "every_process.py", 2, tmp_path_factory.mktemp("printed"), 600.0)
    assert code == 0, printed
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert [each["rank"] for each in found] == [0, 1]
    return found


def both(seen: list[dict[str, Any]], name: str) -> Any:
    """What both have seen alike."""
    first, second = (each[name] for each in seen)
    assert first == second
    return first


def test_every_process_has_all_values(seen: list[dict[str, Any]]) -> None:
    """The program ran on each rank, in one group, and what ranks returned comes in rank order."""
    assert both(seen, "values") == [[0, 1], [1, 1]]


def test_state_is_put_back(seen: list[dict[str, Any]]) -> None:
    """What a program changes in its process is as it was, and a group that the world has made ends with it."""
    assert both(seen, "state is as it was")
    assert both(seen, "group has ended")


def test_a_group_of_the_script_is_used(seen: list[dict[str, Any]]) -> None:
    """Ranks communicate over it, and it stays."""
    assert both(seen, "group is the script's")
    assert both(seen, "group is left")


def test_a_check_finds_what_it_finds_elsewhere(seen: list[dict[str, Any]]) -> None:
    """A right scenario is equivalent, a planted bug diverges at the same place by the same values, in every process's verdict."""
    assert both(seen, "equivalent") == ["equivalent", "torchrun"]
    elsewhere = check(programs.scenario(2), alter=mutant("gradients_summed").plant)
    assert both(seen, "planted") == [elsewhere.outcome.value, repr(elsewhere.divergence)]


def test_a_tensor_program_is_judged_once(seen: list[dict[str, Any]]) -> None:
    """By rank 0: its time is in every process's verdict."""
    assert both(seen, "tensor program")[0] == "equivalent"


def test_a_training_of_a_user_is_that_of_rank_0(seen: list[dict[str, Any]]) -> None:
    """Data that each process draws for itself make no difference."""
    assert both(seen, "training of a user") == "equivalent"


def test_a_world_of_another_size_is_refused(seen: list[dict[str, Any]]) -> None:
    """The line says how many ranks there are, and how many are needed."""
    assert both(seen, "too small").startswith("size 4 is not valid: world torchrun has 2 ranks. Expected torchrun with --nnodes")


def test_a_rank_that_raises_is_told_with_its_host(seen: list[dict[str, Any]]) -> None:
    """In every process; the run is the last one, so that the next fails likewise at once."""
    host = socket.gethostname()
    assert both(seen, "failures") == [f"rank 1 raised ValueError: boom on {host} (on host {host})"] * 2


@pytest.mark.slow
def test_no_rank_waits_for_ever(tmp_path: Path) -> None:
    """Where ranks wait for each other in vain, every process is told what each was doing, and ends."""
    code, printed = run_forked(SCRIPTS / "waiting.py", 2, tmp_path, 600.0)
    host = socket.gethostname()
    expected = f"idle for 2 s: rank 0 waiting in barrier, rank 1 finished (on host {host}: 0, 1) ['barrier', '']"
    assert (code, printed.splitlines()) == (0, [expected] * 2)
