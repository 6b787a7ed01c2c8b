"""`Work` handles for calls on simulated groups. A call's outputs have no valid values until the rank waits for the handle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.futures

from equivcheck.worlds.sim.exchange import Parcel, PendingCollective, RawCall
from equivcheck.worlds.sim.refusals import CallRefused
from equivcheck.worlds.sim.scheduler import Scheduler
from equivcheck.worlds.sim.torch_private import after_backward, in_backward_node, raw_memory


class Board(Protocol):
    """Parts of the simulated world's state used by `Work` handles."""

    @property
    def scheduler(self) -> Scheduler:
        """Scheduler of the world's ranks."""

    @property
    def unwaited(self) -> set[SimWork]:
        """`Work` handles for which no rank has waited yet."""

    @property
    def last_waited(self) -> Any:
        """For each rank, the handle for which it waited last.

        The handle must stay alive, because C++ may next request its future.
        """


class IssuingGroup(Protocol):
    """Parts of a simulated process group used by `Work` handles."""

    @property
    def board(self) -> Board:
        """State shared by the world's ranks."""

    @property
    def global_rank(self) -> int:
        """Global rank of the caller."""

    @property
    def member(self) -> int:
        """The caller's rank within the group."""


class SimWork(dist.Work):
    """`Work` handle of a rank for one call on a simulated group."""

    def __init__(
        self, group: IssuingGroup, raw: RawCall, meeting: PendingCollective, outputs: list[torch.Tensor], shown: Any
    ) -> None:
        super().__init__()
        self.group = group
        self.raw = raw
        self.outputs = outputs
        self._meeting: PendingCollective | None = meeting
        self._shown = shown
        self._future: WorkFuture | None = None
        group.board.unwaited.add(self)

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002 - a call that cannot complete is known at once
        """Let other ranks run until every member has made the call, then fill the outputs. `timeout` is ignored."""
        meeting = self._meeting
        if meeting is not None:
            if meeting.results is None:
                meeting.waiting.append(self.group.global_rank)
                self.group.board.scheduler.block(self.group.global_rank, self.raw)
            self._deliver(meeting)
        return True

    def is_completed(self) -> bool:
        """Whether every member has made the call. If True, the outputs have been filled.

        If a member has not made it, other ranks run before this method returns.
        """
        meeting = self._meeting
        if meeting is None:
            return True
        if meeting.results is None and not self.group.board.scheduler.poll(self.group.global_rank, self.raw):
            return self.wait()
        if meeting.results is None:
            return False
        self._deliver(meeting)
        return True

    def is_success(self) -> bool:
        """Whether the call has completed. If a call fails, the whole run ends."""
        return self._meeting is None

    def exception(self) -> None:
        """Return None. If a call fails, the whole run ends, so no handle has an exception."""

    def synchronize(self) -> None:
        """Do the same as `wait`."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors of the call. Raises `CallRefused` before `wait`."""
        if self._meeting is not None:
            raise CallRefused(
                f"result of {self.raw[0]} is not valid before wait(): gloo has no result until then. Expected wait() first."
            )
        return list(self._shown)

    def get_future(self) -> WorkFuture:
        """Return a future for the outputs.

        C++ waits for futures without letting other ranks run. Outside a backward node, this method therefore waits for the call
        before it returns. Inside a node, a callback waits for the call after all nodes have run. This callback runs before
        callbacks queued later, such as DDP's, which waits for its buckets.
        """
        if self._future is None:
            self._future = WorkFuture(self)
            if self._meeting is None:
                self._future.fulfil(self._shown)
            elif in_backward_node():
                after_backward(self.wait)
            else:
                self.wait()
        return self._future

    @property
    def has_future(self) -> bool:
        """Whether `get_future` was called."""
        return self._future is not None

    def forget(self) -> None:
        """Mark the call as finished without filling its outputs, because the run is over."""
        self._meeting = None
        self._future = None

    def _deliver(self, meeting: PendingCollective) -> None:
        self._meeting = None
        board = self.group.board
        board.unwaited.discard(self)
        board.last_waited[self.group.global_rank] = self
        results = meeting.results
        assert results is not None
        if self.outputs:
            with raw_memory():
                for output, result in zip(self.outputs, results[self.group.member], strict=True):
                    output.copy_(result if result.shape == output.shape else result.view(output.shape))
        results[self.group.member] = []
        self.outputs = []
        if self._future is not None:
            self._future.fulfil(self._shown)


class BarrierWork(SimWork):
    """`Work` handle for a barrier. Waiting for it also completes the rank's earlier collectives on the group."""

    def __init__(self, group: IssuingGroup, *arguments: Any) -> None:
        self._before = [work for work in group.board.unwaited if work.group is group and not isinstance(work, MessageWork)]
        super().__init__(group, *arguments)

    def _deliver(self, meeting: PendingCollective) -> None:
        super()._deliver(meeting)
        for work in self._before:
            work.wait()
        self._before = []


class MessageWork(SimWork):
    """`Work` handle for a send."""


class ReceiveWork(MessageWork):
    """`Work` handle for a receive, with the sender's rank."""

    parcel: Parcel

    def _source_rank(self) -> int:
        self.wait()
        assert self.parcel.sender is not None
        return self.parcel.sender

    def source_rank(self) -> int:
        """Wait for the message, and return its sender's rank within the group."""
        return self._source_rank()


class CoalescedWork(dist.Work):
    """One `Work` handle for several coalesced calls."""

    def __init__(self, works: list[SimWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002 - a call that cannot complete is known at once
        """Wait for all calls, in the order in which they were made."""
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        """Whether all calls have completed."""
        return all(work.is_completed() for work in self._works)


class WorkFuture(torch.futures.Future):  # type: ignore[type-arg]
    """Future for a call's outputs. While Python waits for it, other ranks run."""

    def __init__(self, work: SimWork | None) -> None:
        super().__init__()
        self._work = work
        self._continuations: list[Callable[[], None]] = []

    def wait(self) -> Any:
        """Wait for the call to complete, and return its output tensors."""
        if self._work is not None:
            self._work.wait()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> WorkFuture:
        """Return a future for the result of ``callback(self)``, called when the communication call has completed."""
        child = WorkFuture(self._work)

        def call_back() -> None:
            try:
                value = callback(self)
            except Exception as error:
                child.set_exception(error)
            else:
                child.fulfil(value)

        if self.done():
            call_back()
        else:
            self._continuations.append(call_back)
        return child

    def fulfil(self, value: Any) -> None:
        """Set the future's value and run the callbacks passed to `then`."""
        self._work = None
        self.set_result(value)
        for proceed in self._continuations:
            proceed()
        self._continuations = []
