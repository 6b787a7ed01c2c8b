"""World ``torchrun``: ranks are processes started by torchrun."""

from __future__ import annotations

import atexit
import itertools
import os
import socket
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch.distributed as dist

from equivcheck.errors import UsageError
from equivcheck.worlds.failure import RanksDidNotStart, RanksFailed
from equivcheck.worlds.gloo.request import pickle_task
from equivcheck.worlds.processes.preload import preload
from equivcheck.worlds.ranks import Ranks, Run
from equivcheck.worlds.torchrun.follower import Follower
from equivcheck.worlds.torchrun.group import end_group, make_group, own_place, world_store
from equivcheck.worlds.torchrun.leader import Leader
from equivcheck.worlds.torchrun.links import START_SECONDS, Entrance, connect_to_leader
from equivcheck.worlds.torchrun.place import Place
from equivcheck.worlds.torchrun.rank_thread import RankThread, request_task

T = TypeVar("T")

_ADDRESS = "address"
_STUCK = 1
"""Exit code of a process whose thread still waits for other ranks; it exits at once, because the thread must not return into a
closing interpreter."""

_numbers = itertools.count()
"""Number of the world in this process; equal on all processes, because all of them join the same worlds."""


class TorchrunRanks(Ranks):
    """Ranks started by torchrun; this process is one of them.

    Every process makes the same calls. All of them run rank 0's program, and get its result or exception. After a failed run, no
    further run is possible. All `TorchrunRanks` in a process share one connection, which closes with the last of them.
    """

    name: ClassVar[str] = "torchrun"
    has_copies: ClassVar[bool] = True
    spans_hosts: ClassVar[bool] = True

    _member: ClassVar[Leader | Follower | None] = None
    _has_made_group: ClassVar[bool] = False
    _users: ClassVar[weakref.WeakSet[TorchrunRanks]] = weakref.WeakSet()

    def __init__(self, size: int | None = None) -> None:
        """Join all ranks; raises `UsageError` if their number differs from `size`."""
        place = own_place()
        if size not in (None, place.size):
            raise UsageError(
                f"size {size} is not valid: world torchrun has {place.size} ranks. "
                f"Expected a torchrun command in which --nnodes times --nproc-per-node is {size}."
            )
        super().__init__(place.size)
        self._joined()

    def on_first_rank(self, work: Callable[[], T]) -> T:
        """Call `work` in the process of rank 0 only, and return its result or raise its exception on every rank."""
        return self._joined().do(work)

    def run(
        self,
        program: Callable[..., Any],
        *arguments: Any,
        schedule_seed: int = 0,  # noqa: ARG002
        deadline: float = 60.0,
        is_user_code: bool = True,
    ) -> Run:
        """Run rank 0's program on all ranks, as `Ranks.run` describes. Every process must call this method."""

        def lead() -> Run:
            leader = self._joined()
            assert isinstance(leader, Leader), "only rank 0 leads"
            task = pickle_task(program, arguments, is_user_code=is_user_code)
            return Run(values=leader.run(request_task(task, is_user_code=is_user_code), deadline))

        return self.on_first_rank(lead)

    def close(self) -> None:
        """Close the connection to the other ranks, unless another world in this process uses it.

        After a failed run it stays open, so that later runs raise the same error.
        """
        self._users.discard(self)
        if not self._users and self._member is not None and self._member.is_usable:
            _leave(self._member)
            TorchrunRanks._member = None

    def _joined(self) -> Leader | Follower:
        if TorchrunRanks._member is None:
            TorchrunRanks._member = _join(own_place())
        self._users.add(self)
        return TorchrunRanks._member


def _join(place: Place) -> Leader | Follower:
    preload()
    name = f"equivcheck/{next(_numbers)}"
    store = dist.PrefixStore(name, world_store(place))  # type: ignore[attr-defined]
    thread = RankThread(place.rank)
    member = _leader(place, store, thread) if place.rank == 0 else Follower(place, _entered(place, store), thread)
    atexit.register(_end_if_stuck, member)
    if not dist.is_initialized():
        _make_group(member, f"{name}/group")
    return member


def _leader(place: Place, store: Any, thread: RankThread) -> Leader:
    entrance = Entrance()
    host = socket.gethostname()
    store.set(_ADDRESS, entrance.address(os.environ.get("MASTER_ADDR") or host))
    admitted = entrance.admit(place.size)
    entrance.close()
    links = {rank: link for rank, (link, _) in admitted.items()}
    return Leader(place, links, {0: host} | {rank: admitted[rank][1] for rank in sorted(admitted)}, thread)


def _entered(place: Place, store: Any) -> Any:
    try:
        store.wait([_ADDRESS], timedelta(seconds=START_SECONDS))
        return connect_to_leader(store.get(_ADDRESS), place.rank)
    except RuntimeError as error:
        raise RanksDidNotStart(f"world torchrun: rank {place.rank} got no address from rank 0: {error}") from error


def _make_group(member: Leader | Follower, name: str) -> None:
    """Create a process group on all ranks. If one rank fails, `Patience` ends the other ranks, not a time limit of the group."""

    def lead() -> None:
        assert isinstance(member, Leader), "only rank 0 leads"
        member.run(request_task(pickle_task(make_group, (name,), is_user_code=False), is_user_code=False), START_SECONDS)

    try:
        member.do(lead)
    except RanksFailed as error:
        raise RanksDidNotStart(f"world torchrun: the ranks could not make a process group: {error}") from error
    TorchrunRanks._has_made_group = True


def _leave(member: Leader | Follower) -> None:
    member.close()
    if TorchrunRanks._has_made_group:
        TorchrunRanks._has_made_group = False
        end_group()
    member.thread.end()
    atexit.unregister(_end_if_stuck)


def _end_if_stuck(member: Leader | Follower) -> None:
    """Exit at once if a thread still waits in C++, because it would abort the process during shutdown."""
    if member.thread.is_stuck:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_STUCK)
