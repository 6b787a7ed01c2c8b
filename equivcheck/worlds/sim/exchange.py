"""Matches ranks' calls: collectives on one group by their order, messages between two ranks by their tag."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from equivcheck.worlds.call import BEFORE_STEPS, Call
from equivcheck.worlds.sim.arithmetic import Combine, DisagreementError
from equivcheck.worlds.sim.scheduler import Scheduler
from equivcheck.worlds.trace.stage import Stage

KEPT_CALLS = 4096
"""Cached call records, a few hundred bytes each; a group's ranks issue equal calls, and so do a campaign's runs."""

Mark = tuple[Stage, int]
"""Training stage and step."""

BEFORE: Mark = (Stage.SETUP, BEFORE_STEPS)
"""Stage and step until the program announces another stage."""

RawCall = tuple[str, tuple[int, ...], int, tuple[torch.Size, ...], torch.dtype | None, int | None, Mark]
"""`Call` fields without its bytes, cheap to record: op, ranks, index, shapes, dtype, peer, stage and step."""


@lru_cache(maxsize=KEPT_CALLS)
def call_of(raw: RawCall) -> Call:
    """Build a `Call` from `raw`, the tuple that was recorded when the rank made the call."""
    op, ranks, index, shapes, dtype, peer, (stage, step) = raw
    num_bytes = 0 if dtype is None else sum(shape.numel() for shape in shapes) * dtype.itemsize
    name = "" if dtype is None else str(dtype).removeprefix("torch.")
    return Call(
        op=op,
        ranks=ranks,
        index=index,
        shapes=tuple(map(tuple, shapes)),
        dtype=name,
        num_bytes=num_bytes,
        peer=peer,
        stage=stage,
        step=step,
    )


class Request(NamedTuple):
    """One rank's call to a collective."""

    op: str
    """Operation as in `Call.op`."""
    tensors: list[torch.Tensor]
    """Tensors whose shapes describe the call, as in `Call.shapes`."""
    share: Any
    """Copies of the rank's inputs, in the form that `combine` takes."""
    combine: Combine
    """Function that computes every member's outputs from all members' inputs."""
    root: int | None = None
    """Root's rank within the group."""
    sized: bool = True
    """Whether all members must pass equal tensor sizes."""
    orders: tuple[Hashable, ...] = ()
    """Memory orders of the tensors' dims, which must be equal on all members; empty for contiguous tensors."""


class PendingCollective:
    """One collective in progress, from the first member's call until the last member has waited for it."""

    __slots__ = ("agree", "first", "num_missing", "results", "shares", "waiting")

    def __init__(self, size: int, agree: tuple[Hashable, ...], first: tuple[int, RawCall]) -> None:
        self.agree = agree
        self.first = first
        self.num_missing = size
        self.shares: list[Any] = [None] * size
        self.results: list[list[torch.Tensor]] | dict[int, list[torch.Tensor]] | None = None
        self.waiting: list[int] = []

    def complete(self, results: list[list[torch.Tensor]] | dict[int, list[torch.Tensor]], scheduler: Scheduler) -> None:
        """Store each member's outputs, and wake the ranks that wait in this call."""
        self.results = results
        self.shares.clear()
        for rank in self.waiting:
            scheduler.wake(rank)


class Parcel(PendingCollective):
    """One point-to-point message in progress, from the first call by one side until both sides have waited for it."""

    __slots__ = ("payload", "receiver", "sender", "tag")

    def __init__(self, sender: int | None, receiver: int, tag: int, first: tuple[int, RawCall]) -> None:
        super().__init__(0, (), first)
        self.sender = sender
        self.receiver = receiver
        self.tag = tag
        self.payload: list[torch.Tensor] | None = None


class CallMatcher:
    """Matches the calls of all ranks in one process group.

    The n-th collectives of all ranks belong together. Messages match if sender, receiver and tag are equal.
    """

    def __init__(self, ranks: tuple[int, ...], scheduler: Scheduler) -> None:
        self.ranks = ranks
        self._scheduler = scheduler
        self.clear()

    def clear(self) -> None:
        """Forget all calls, before the next run numbers its calls from 0."""
        self.issued = [0] * len(self.ranks)
        self.hidden = [0] * len(self.ranks)
        self._open: dict[int, PendingCollective] = {}
        self._parcels: list[Parcel] = []
        self._num_collectives = [0] * len(self.ranks)

    def join(self, member: int, raw: RawCall, agree: tuple[Hashable, ...], combine: Combine, share: Any) -> PendingCollective:
        """Register a member's call to a collective. After the last member's call, compute all members' outputs.

        `agree` has everything that must be equal on all members, such as operation and sizes; otherwise the run ends. `share` has
        this member's inputs, and `combine` computes the outputs from all members' inputs.
        """
        index = self._num_collectives[member]
        self._num_collectives[member] = index + 1
        meeting = self._open.get(index)
        if meeting is None:
            meeting = self._open[index] = PendingCollective(len(self.ranks), agree, (self.ranks[member], raw))
        elif meeting.agree != agree:
            self._mismatch(member, raw, meeting, _other_orders(agree, meeting.agree))
        meeting.shares[member] = share
        meeting.num_missing -= 1
        if not meeting.num_missing:
            del self._open[index]
            try:
                results = combine(meeting.shares)
            except DisagreementError as error:
                self._mismatch(member, raw, meeting, f": {error}")
            meeting.complete(results, self._scheduler)
        return meeting

    def send(self, member: int, receiver: int, tag: int, raw: RawCall, payload: list[torch.Tensor]) -> Parcel:
        """Register a message from `member`.

        It goes to the oldest matching receive, or waits until a matching receive is called.
        """
        for parcel in self._parcels:
            if parcel.payload is None and parcel.receiver == receiver and parcel.tag == tag and parcel.sender in (member, None):
                break
        else:
            parcel = Parcel(member, receiver, tag, (self.ranks[member], raw))
            parcel.payload = payload
            self._parcels.append(parcel)
            return parcel
        parcel.sender = member
        self._match(member, parcel, raw, payload)
        return parcel

    def receive(self, member: int, sender: int | None, tag: int, raw: RawCall) -> Parcel:
        """Register a receive by `member`. The receive gets the oldest matching message, or waits for one.

        If `sender` is None, any sender matches.
        """
        for parcel in self._parcels:
            if parcel.payload is not None and parcel.receiver == member and parcel.tag == tag and sender in (parcel.sender, None):
                self._match(member, parcel, raw, parcel.payload)
                return parcel
        parcel = Parcel(sender, member, tag, (self.ranks[member], raw))
        self._parcels.append(parcel)
        return parcel

    def _match(self, member: int, parcel: Parcel, raw: RawCall, payload: list[torch.Tensor]) -> None:
        theirs = parcel.first[1]
        if [shape.numel() for shape in raw[3]] != [shape.numel() for shape in theirs[3]] or raw[4] != theirs[4]:
            self._mismatch(member, raw, parcel, "")
        self._parcels.remove(parcel)
        assert parcel.sender is not None
        parcel.complete({parcel.sender: [], parcel.receiver: payload}, self._scheduler)

    def _mismatch(self, member: int, raw: RawCall, meeting: PendingCollective, detail: str) -> None:
        rank = self.ranks[member]
        other, theirs = meeting.first
        text = f"rank {rank} issued {call_of(raw).describe()}, but rank {other} issued {call_of(theirs).describe()}{detail}"
        self._scheduler.give_up(rank, raw, text)


def _other_orders(agree: tuple[Hashable, ...], theirs: tuple[Hashable, ...]) -> str:
    """Return text for a mismatch only in memory orders."""
    if agree[:-1] != theirs[:-1]:
        return ""
    ours, others = (orders or "contiguous" for orders in (agree[-1], theirs[-1]))
    return f": memory orders of dims differ, {ours} and {others}, so gloo computes wrong values (pytorch #192920)"
