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
    """Build the record of a call from the fields saved when the rank made the call."""
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
    """A rank's collective call on a group."""

    op: str
    """Operation as in `Call.op`."""
    tensors: list[torch.Tensor]
    """Tensors that describe the call, as in `Call.shapes`."""
    share: Any
    """The rank's copied inputs, in the form that `combine` takes."""
    combine: Combine
    """Function from all members' shares to all members' results."""
    root: int | None = None
    """Root's rank within the group."""
    sized: bool = True
    """Whether all members must pass equal tensor sizes."""
    orders: tuple[Hashable, ...] = ()
    """Tensors' memory orders, which must be equal on all members; empty for contiguous tensors."""


class PendingCollective:
    """One collective, from the first member's call to the last member's wait."""

    __slots__ = ("agree", "first", "num_missing", "results", "shares", "waiting")

    def __init__(self, size: int, agree: tuple[Hashable, ...], first: tuple[int, RawCall]) -> None:
        self.agree = agree
        self.first = first
        self.num_missing = size
        self.shares: list[Any] = [None] * size
        self.results: list[list[torch.Tensor]] | dict[int, list[torch.Tensor]] | None = None
        self.waiting: list[int] = []

    def complete(self, results: list[list[torch.Tensor]] | dict[int, list[torch.Tensor]], scheduler: Scheduler) -> None:
        """Publish the results by member and wake the ranks that wait for them."""
        self.results = results
        self.shares.clear()
        for rank in self.waiting:
            scheduler.wake(rank)


class Parcel(PendingCollective):
    """One point-to-point message, from the first side's call to the last side's wait."""

    __slots__ = ("payload", "receiver", "sender", "tag")

    def __init__(self, sender: int | None, receiver: int, tag: int, first: tuple[int, RawCall]) -> None:
        super().__init__(0, (), first)
        self.sender = sender
        self.receiver = receiver
        self.tag = tag
        self.payload: list[torch.Tensor] | None = None


class CallMatcher:
    """Matches the calls by all members on one group."""

    def __init__(self, ranks: tuple[int, ...], scheduler: Scheduler) -> None:
        self.ranks = ranks
        self._scheduler = scheduler
        self.clear()

    def clear(self) -> None:
        """Forget every call. The next run starts from index 0.

        `hidden` counts additional calls by gloo.
        """
        self.issued = [0] * len(self.ranks)
        self.hidden = [0] * len(self.ranks)
        self._open: dict[int, PendingCollective] = {}
        self._parcels: list[Parcel] = []
        self._num_collectives = [0] * len(self.ranks)

    def join(self, member: int, raw: RawCall, agree: tuple[Hashable, ...], combine: Combine, share: Any) -> PendingCollective:
        """Add a member's next collective. The last member to arrive computes the results."""
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
        """Hand a message to the oldest matching receive, or keep it until such a receive comes."""
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
        """Take the oldest matching message (from any sender if `sender` is None), or wait for one."""
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
