"""The process group of rank threads, and the mapping from threads to ranks."""

from __future__ import annotations

import threading
from typing import Any

from equivcheck.worlds.marks import listen
from equivcheck.worlds.sim.group.messages import Messages
from equivcheck.worlds.sim.group.moves import Moves
from equivcheck.worlds.sim.group.reductions import Reductions
from equivcheck.worlds.sim.switchboard import Switchboard

_seat = threading.local()


class SimGroup(Reductions, Moves, Messages):
    """A simulated process group. Each member has its own object, as in `torch.distributed`."""


def take_seat(board: Switchboard, rank: int) -> None:
    """Make the calling thread rank `rank` in the simulated world that `board` describes.

    Process groups that the thread creates later belong to this world.
    """
    _seat.board, _seat.rank = board, rank
    listen(lambda stage, step: board.marks.__setitem__(rank, (stage, step)))


def board_of_rank() -> tuple[Switchboard, int]:
    """Return the state shared by the world's ranks, and the calling thread's rank."""
    return _seat.board, _seat.rank


def make_group(options: Any, _: Any) -> SimGroup:
    """Create the calling rank's object for a simulated group. `torch.distributed` calls this function to create groups."""
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return SimGroup(_seat.board, _seat.rank, options.group_id, ranks, options.group_rank)
