"""No copy of a rank continues next to it or replaces it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from equivcheck.worlds.failure import FailureKind, RanksFailed
from equivcheck.worlds.pool import open_ranks
from equivcheck.worlds.ranks import Ranks
from support.processes import end_soon
from unit.worlds import forking


@pytest.fixture(scope="module", params=["sim", "gloo"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Two ranks in each world."""
    with open_ranks(request.param, 2) as members:
        yield members


def are_gone(folder: Path) -> bool:
    """Whether processes have recorded themselves, and all of them end."""
    pids = [int(path.name) for path in folder.iterdir()]
    return bool(pids) and end_soon(*pids)


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (forking.comes_out, r"process \d+ returned from the program"),
        (forking.raises, r"process \d+ returned from the program"),
        (forking.communicates, r"process \d+ was left running and has been killed"),
    ],
)
def test_a_copy_is_ended_and_reported(ranks: Ranks, tmp_path: Path, program: Callable[..., object], error: str) -> None:
    """A copy that returns, raises or waits forever is killed, the run fails, and the next one is right."""
    with pytest.raises(RanksFailed) as caught:
        ranks.run(program, str(tmp_path))
    assert caught.value.failure.kind is FailureKind.RAISED
    advice = r"A copy must end by os\._exit or exec\."
    expected = rf"rank 0 raised (\w+\.)*ProgramForked: the program forked \(os.fork\): {error}\. {advice}"
    assert re.fullmatch(expected, caught.value.failure.summary)
    assert are_gone(tmp_path)
    assert ranks.run(forking.ends_its_copies).values == ((3, 0),) * 2


def test_a_copy_that_works_may_end_by_itself(ranks: Ranks) -> None:
    """Only an idle copy counts as left running, because a busy machine may delay its end."""
    assert ranks.run(forking.computes).values == (1, 1)


def test_an_error_of_the_rank_comes_first(ranks: Ranks, tmp_path: Path) -> None:
    """Copies of a rank that raises are killed, and the rank's own error is reported."""
    with pytest.raises(RanksFailed, match="rank 0 raised ValueError: from the rank"):
        ranks.run(forking.fails_beside, str(tmp_path))
    assert are_gone(tmp_path)
