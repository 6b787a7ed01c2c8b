"""Makes a communication call in a simulated group. The call is checked, recorded, and matched with the other members' calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from equivcheck.worlds.sim import arithmetic
from equivcheck.worlds.sim.exchange import RawCall, Request
from equivcheck.worlds.sim.group.identity import GroupIdentity
from equivcheck.worlds.sim.refusals import check_root, check_type
from equivcheck.worlds.sim.torch_private import raw_memory, wait_for_result
from equivcheck.worlds.sim.work import CoalescedWork, SimWork

Tensors = list[torch.Tensor]

_OP_NAMES = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
_OPS = {getattr(dist.ReduceOp, name.upper()): name for name in _OP_NAMES}


class GroupCalls(GroupIdentity):
    """Base class with the code that all communication calls in a simulated group share."""

    _coalesced: list[SimWork] | None = None

    def _start_coalescing(self, _device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, _device: torch.device) -> CoalescedWork:
        works, self._coalesced = self._coalesced or [], None
        return CoalescedWork(works)

    def _collective(self, request: Request, outputs: Tensors, shown: Any = None, make_work: type[SimWork] = SimWork) -> SimWork:
        root = request.root
        if request.tensors:
            check_type(request.op, request.tensors[0].dtype)
        if root is not None:
            check_root(request.op, root, len(self.ranks))
        raw = self._note(request.op, request.tensors, None if root is None else self.ranks[root])
        sizes = tuple([shape.numel() for shape in raw[3]]) if request.sized else ()
        agree = (request.op, raw[4], root, sizes, request.orders)
        meeting = self._exchange.join(self.member, raw, agree, request.combine, request.share)
        if outputs:
            with raw_memory():
                for output in outputs:
                    arithmetic.fill_unset(output)
        return self._keep(make_work(self, raw, meeting, outputs, outputs if shown is None else shown))

    def _note(self, op: str, tensors: Tensors, peer: int | None) -> RawCall:
        self.require_own()
        scheduler = self.board.scheduler
        scheduler.check()
        scheduler.progress()
        index = self._exchange.issued[self.member]
        self._exchange.issued[self.member] = index + 1
        dtype = tensors[0].dtype if tensors else None
        rank = self.global_rank
        raw = (op, self.ranks, index, tuple([tensor.shape for tensor in tensors]), dtype, peer, self.board.marks[rank])
        self.board.calls[rank].append(raw)
        return raw

    def _keep(self, work: SimWork) -> SimWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work


def as_list(tensors: Any) -> Tensors:
    """Return the tensors as a list, also if `tensors` is a single tensor. Results of functional collectives are waited for."""
    return [wait_for_result(tensor) for tensor in ([tensors] if isinstance(tensors, torch.Tensor) else tensors)]


def root_of(opts: Any) -> int:
    """Return the root's rank within the group from `opts`, torch's options for a collective."""
    return int(opts) if isinstance(opts, int) else int(opts.rootRank)


def copies_of(tensors: Tensors) -> Tensors:
    """Return contiguous copies, so that the sender may overwrite its tensors before the receiver reads them."""
    tensors = [wait_for_result(tensor) for tensor in tensors]
    with raw_memory():
        return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]


def reduction_of(opts: Any) -> str:
    """Return the reduction's name, such as ``sum``, from `opts`, torch's options for a collective."""
    reduce_op = getattr(opts, "reduceOp", opts)
    return _OPS[getattr(reduce_op, "op", reduce_op)]
