"""Messages in a simulated group.

A send is buffered. Its work completes when the receiver has taken the message, so a blocking send waits for the receiver.
"""

from __future__ import annotations

from equivcheck.worlds.sim import arithmetic
from equivcheck.worlds.sim.group.calls import GroupCalls, Tensors, as_list, copies_of
from equivcheck.worlds.sim.group.shapes import check_one
from equivcheck.worlds.sim.refusals import check_contiguous, check_peer, check_strided
from equivcheck.worlds.sim.torch_private import raw_memory
from equivcheck.worlds.sim.work import MessageWork, ReceiveWork, SimWork


class Messages(GroupCalls):
    """Point-to-point calls in a simulated group."""

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> SimWork:  # noqa: N803 - torch names them
        """Send a tensor to another member."""
        tensors = as_list(tensors)
        check_one("send", tensors)
        check_peer("send", self.member, dstRank)
        check_strided("send", tensors)
        check_contiguous("send", tensors)
        share = copies_of(tensors)
        raw = self._note("send", tensors, self.ranks[dstRank])
        parcel = self._exchange.send(self.member, dstRank, tag, raw, share)
        return self._keep(MessageWork(self, raw, parcel, [], tensors))

    def recv(self, tensors: Tensors, srcRank: int | None, tag: int = 0) -> SimWork:  # noqa: N803 - torch names them
        """Receive a tensor from another member."""
        check_one("recv", tensors)
        check_peer("recv", self.member, srcRank)
        check_strided("recv", tensors)
        check_contiguous("recv", tensors)
        raw = self._note("recv", tensors, None if srcRank is None else self.ranks[srcRank])
        parcel = self._exchange.receive(self.member, srcRank, tag, raw)
        with raw_memory():
            for tensor in tensors:
                arithmetic.fill_unset(tensor)
        work = ReceiveWork(self, raw, parcel, tensors, tensors)
        work.parcel = parcel
        return self._keep(work)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> SimWork:
        """Receive a tensor from the first member to send one."""
        return self.recv(tensors, None, tag)
