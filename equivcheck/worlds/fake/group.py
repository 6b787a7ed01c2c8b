"""A group without other members: calls are recorded as in a simulated world and complete at once."""

from __future__ import annotations

from typing import Any

import torch

from equivcheck.errors import EquivCheckError
from equivcheck.worlds.sim.exchange import PendingCollective, RawCall, Request
from equivcheck.worlds.sim.process_group import SimGroup
from equivcheck.worlds.sim.torch_private import raw_memory
from equivcheck.worlds.sim.work import ReceiveWork, SimWork

Tensors = list[torch.Tensor]


class LoneScheduler:
    """Scheduler for a world in which only one rank runs."""

    def check(self) -> None:
        """Do nothing. In other worlds this method ends the calling rank if another rank has failed."""

    progress = check

    def block(self, _rank: int, pending: RawCall) -> None:
        """Raise `EquivCheckError`, because the rank would wait for another rank, and no other rank exists."""
        raise EquivCheckError(
            f"{pending[0]}: waiting in world fake is not supported: no other rank can write to the store. Use sim or gloo."
        )

    def wake(self, _rank: int) -> None:
        """Do nothing. In other worlds this method lets a waiting rank continue."""


class LoneGroup(SimGroup):
    """Process group in the world ``fake``: only the calling rank exists.

    Outputs have the right shape but no meaningful values. An all-gather repeats the rank's own tensor for each member, and a
    reduction returns the rank's own tensor. Other outputs keep the values that were in their memory.
    """

    def send(self, tensors: Tensors, receiver: int, tag: int = 0) -> SimWork:  # noqa: ARG002 - torch names them
        """Record the call. Nothing is sent, because no other rank exists."""
        return self._done(self._note("send", tensors, self.ranks[receiver]), tensors)

    def recv(self, tensors: Tensors, sender: int | None, tag: int = 0) -> SimWork:  # noqa: ARG002
        """Record the call and leave `tensors` unchanged.

        If `sender` is None, the returned handle's `source_rank` is the calling rank.
        """
        raw = self._note("recv", tensors, None if sender is None else self.ranks[sender])
        meeting = self._met(raw)
        work = ReceiveWork(self, raw, meeting, [], tensors)
        work.parcel = _Anybody(self.member if sender is None else sender)  # type: ignore[assignment]
        return self._keep(work)

    def _collective(self, request: Request, outputs: Tensors, shown: Any = None, make_work: type[SimWork] = SimWork) -> SimWork:
        root = request.root
        raw = self._note(request.op, request.tensors, None if root is None else self.ranks[root])
        if request.op == "all_gather":
            self._fill(request.share, outputs)
        return self._done(raw, outputs if shown is None else shown, make_work)

    def _fill(self, inputs: Tensors, outputs: Tensors) -> None:
        with raw_memory():
            if len(outputs) == len(inputs) and len(self.ranks) > 1:
                for source, output in zip(inputs, outputs, strict=True):
                    output.view(len(self.ranks), -1).copy_(source.reshape(1, -1))
            else:
                for number, output in enumerate(outputs):
                    output.copy_(inputs[number // len(self.ranks)].view(output.shape))

    def _done(self, raw: RawCall, shown: Any, make_work: type[SimWork] = SimWork) -> SimWork:
        return self._keep(make_work(self, raw, self._met(raw), [], shown))

    def _met(self, raw: RawCall) -> PendingCollective:
        meeting = PendingCollective(1, (), (self.member, raw))
        meeting.results = {self.member: []}
        return meeting


class _Anybody:
    """Sender of a message that no rank has sent."""

    def __init__(self, sender: int) -> None:
        self.sender = sender
