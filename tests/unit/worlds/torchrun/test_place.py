"""Rank and world size from the environment."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from equivcheck.errors import UsageError
from equivcheck.worlds.torchrun.place import Place, is_first_rank, place_of

STARTED = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_a_place_is_read() -> None:
    """Rank and size are read from torchrun's variables."""
    assert place_of(STARTED) == Place(rank=1, size=4)


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (
            {},
            "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: no launcher .*: start it by torchrun",
        ),
        (STARTED | {"MASTER_ADDR": ""}, "MASTER_ADDR not set"),
        ({"SLURM_PROCID": "3"}, r"torch does not read Slurm's variables. Expected torchrun .* export RANK=\$SLURM_PROCID"),
        (STARTED | {"WORLD_SIZE": "two"}, "WORLD_SIZE 'two' is not valid. Expected a number, at least 1"),
        (STARTED | {"RANK": "4"}, "RANK 4 is not valid for WORLD_SIZE 4. Expected 0 to 3"),
    ],
)
def test_what_says_no_place_is_refused(environment: Mapping[str, str], text: str) -> None:
    """The line names the missing or wrong variable, and the remedy."""
    with pytest.raises(UsageError, match=text):
        place_of(environment)


@pytest.mark.parametrize(
    ("environment", "first"),
    [({}, True), ({"RANK": "0"}, True), (STARTED, False), ({"SLURM_PROCID": "0"}, True), ({"SLURM_PROCID": "1"}, False)],
)
def test_one_process_speaks(environment: Mapping[str, str], first: bool) -> None:
    """Rank 0 prints, or Slurm's first task if no rank is set, or the only process."""
    assert is_first_rank(environment) is first
