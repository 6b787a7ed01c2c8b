"""One rank of a world without peers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch.distributed as dist

from equivcheck.errors import EquivCheckError, UsageError
from equivcheck.worlds.failure import Failure, FailureKind, RankReport, RanksFailed, RankState
from equivcheck.worlds.fake.group import LoneGroup, LoneScheduler
from equivcheck.worlds.marks import listen
from equivcheck.worlds.meshes import end_run
from equivcheck.worlds.processes.forks import WatchedForks
from equivcheck.worlds.ranks import Ranks, Run
from equivcheck.worlds.sim.exchange import call_of
from equivcheck.worlds.sim.ranks import threads_as_ranks
from equivcheck.worlds.sim.switchboard import Switchboard
from equivcheck.worlds.sim.torch_private import HashStore, is_rank_thread, join_world, prepare_rank_thread
from equivcheck.worlds.state.keeper import StateKeeper


class FakeRanks(Ranks):
    """World ``fake``: runs one rank of a world with `size` ranks. Shapes and collective calls are real, received values are not.

    Each run uses a new thread with a new default process group, and records this rank's calls and return value.
    """

    name: ClassVar[str] = "fake"
    has_data: ClassVar[bool] = False

    def __init__(self, size: int, rank: int = 0) -> None:
        if not 0 <= rank < size:
            raise UsageError(f"rank {rank} is not valid: the world has {size} ranks. Expected 0 to {size - 1}.")
        super().__init__(size)
        self.rank = rank

    def run(
        self,
        program: Callable[..., Any],
        *arguments: Any,
        schedule_seed: int = 0,  # noqa: ARG002
        deadline: float = 60.0,
        is_user_code: bool = True,
    ) -> Run:
        """Call ``program(*arguments)`` on the rank.

        Raises `RanksFailed` if the program raises or takes longer than `deadline` seconds.
        """
        if is_rank_thread():
            raise EquivCheckError("FakeRanks.run: a call from a rank thread is not supported: call it from another thread.")
        visit = _Visit(self.rank, self.size, lambda: program(*arguments))
        with threads_as_ranks(visit.make_group, StateKeeper(), is_user_code=is_user_code):
            visit.thread.start()
            visit.thread.join(deadline)
        if visit.thread.is_alive():
            raise _failed(self.rank, RankState.RUNNING, FailureKind.TIMEOUT, f"rank {self.rank} still ran after {deadline:g} s")
        if visit.error is not None:
            text = f"{type(visit.error).__name__}: {visit.error}"
            raise _failed(self.rank, RankState.RAISED, FailureKind.RAISED, text) from visit.error
        return Run(values=(visit.value,), calls=(tuple(map(call_of, visit.board.calls[self.rank])),))

    def close(self) -> None:
        """Do nothing, because this world keeps nothing open between runs."""


class _Visit:
    """One run."""

    def __init__(self, rank: int, size: int, program: Callable[[], Any]) -> None:
        self.rank, self.size = rank, size
        scheduler: Any = LoneScheduler()
        self.board = Switchboard(size, scheduler)
        self.value: Any = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._serve, args=(program,), daemon=True, name=f"fake-rank-{rank}")

    def make_group(self, options: Any, _: Any) -> LoneGroup:
        """Create a process group. `torch.distributed` calls this method to create groups."""
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        return LoneGroup(self.board, self.rank, options.group_id, ranks, options.group_rank)

    def _serve(self, program: Callable[[], Any]) -> None:
        try:
            prepare_rank_thread()
            listen(lambda stage, step: self.board.marks.__setitem__(self.rank, (stage, step)))
            join_world(HashStore(), self.rank, self.size)
            with WatchedForks():
                self.value = program()
        except BaseException as error:
            self.error = error
        finally:
            end_run()
            if dist.is_initialized():
                dist.destroy_process_group()


def _failed(rank: int, state: RankState, kind: FailureKind, text: str) -> RanksFailed:
    report = RankReport(rank=rank, state=state, error=text)
    return RanksFailed(Failure(kind=kind, summary=text, reports=(report,)))
