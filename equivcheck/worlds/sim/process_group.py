"""The process group that rank threads see: each call is captured, entered in its group's exchange, and given a handle."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

from equivcheck.worlds.marks import listen
from equivcheck.worlds.sim import arithmetic
from equivcheck.worlds.sim.exchange import RawCall, Request
from equivcheck.worlds.sim.refusals import (
    check_contiguous,
    check_gaps,
    check_list_all_to_all,
    check_peer,
    check_root,
    check_type,
    common_order,
    orders_in_memory,
)
from equivcheck.worlds.sim.switchboard import Switchboard
from equivcheck.worlds.sim.torch_private import raw_memory
from equivcheck.worlds.sim.work import CoalescedWork, ReceiveWork, SimWork

Tensors = list[torch.Tensor]

_ProcessGroup: Any = dist.ProcessGroup
_CPU = [torch.device("cpu")]
_OP_NAMES = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
_OPS = {getattr(dist.ReduceOp, name.upper()): name for name in _OP_NAMES}
_seat = threading.local()


def take_seat(board: Switchboard, rank: int) -> None:
    """Make the calling thread that rank of that world, for the groups it will make."""
    _seat.board, _seat.rank = board, rank
    listen(lambda stage, step: board.marks.__setitem__(rank, (stage, step)))


def make_group(options: Any, _: Any) -> SimGroup:
    """Make the calling rank's side of a group; what `torch.distributed` calls for this backend."""
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return SimGroup(_seat.board, _seat.rank, options.group_id, ranks, options.group_rank)


class SimGroup(_ProcessGroup):  # type: ignore[misc]  # torch's overloads differ from version to version
    """One rank's side of a group; the method names are those of torch 2.9 to 2.15."""

    supports_coalescing = False
    supports_splitting = False
    supports_time_estimate = False
    is_complete = False
    """Whether `torch.distributed` knows the group; before, it has no devices, so that torch attaches no recorder of calls."""

    def __init__(self, board: Switchboard, global_rank: int, name: str, ranks: tuple[int, ...], member: int) -> None:
        super().__init__(member, len(ranks))
        self.board = board
        self.global_rank = global_rank
        self._name = name
        self.ranks = ranks
        self.member = member
        self._exchange = board.exchange(name, ranks)
        self._coalesced: list[SimWork] | None = None

    # What torch asks a group about itself.

    def rank(self) -> int:
        """Rank of the caller within the group."""
        return self.member

    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def name(self) -> str:
        """Name of the backend, for Python."""
        return "gloo"

    _get_backend_name = name

    def getBackendName(self) -> str:  # noqa: N802
        """Name of the backend, for C++, which would look inside gloo's for what to log."""
        return "equivcheck_sim"

    @property
    def group_name(self) -> str:
        """Name of the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What the group is for, as far as known."""
        return self._name

    def getGroupName(self) -> str:  # noqa: N802
        """Name of the group, for C++."""
        return self._name

    getGroupDesc = getGroupName  # noqa: N815

    @property
    def _device_types(self) -> list[torch.device]:
        return _CPU if self.is_complete else []

    def _get_backend(self, _device: torch.device) -> SimGroup:
        return self

    def supports_tensor_alloc(self, _device: torch.device) -> bool:
        """Whether the group has memory of its own to give."""
        return False

    def shutdown(self) -> None:
        """Nothing is held."""

    abort = shutdown

    # Collectives that reduce.

    def allreduce(self, tensors: Any, opts: Any = dist.ReduceOp.SUM) -> SimWork:
        """Reduce tensors in place on all members."""
        tensors = _listed(tensors)
        check_gaps("all_reduce", tensors)
        op, share = _reduction(opts, tensors)
        request = Request(f"all_reduce.{op}", tensors, share, arithmetic.all_reduce(op), orders=orders_in_memory(tensors))
        return self._collective(request, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any) -> SimWork:
        """Reduce tensors onto the root."""
        tensors = _listed(tensors)
        check_gaps("reduce", tensors)
        op, share = _reduction(opts, tensors)
        root = opts.rootRank
        outputs = tensors if root == self.member else []
        request = Request(f"reduce.{op}", tensors, share, arithmetic.reduce(op, root), root, orders=orders_in_memory(tensors))
        return self._collective(request, outputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = dist.ReduceOp.SUM) -> SimWork:
        """Reduce a list with one tensor for each member, and give each its own."""
        (listed,) = inputs if isinstance(inputs[0], (list, tuple)) else [inputs]
        outputs = _listed(outputs)
        check_gaps("reduce_scatter", outputs)
        common_order("reduce_scatter", [*listed[self.member : self.member + 1], *outputs])
        orders = orders_in_memory(listed)
        op, share = _reduction(opts, listed)
        request = Request(f"reduce_scatter.{op}", listed, share, arithmetic.reduce_scatter(op), orders=orders)
        return self._collective(request, outputs)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = dist.ReduceOp.SUM) -> SimWork:
        """Reduce a tensor and give each member an equal part."""
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = dist.ReduceOp.SUM) -> SimWork:
        """`reduce_scatter_single` for several tensors."""
        self._check_sizes("reduce_scatter", outputs, inputs)
        op, share = _reduction(opts, inputs)
        orders = orders_in_memory(inputs)
        request = Request(f"reduce_scatter.{op}", inputs, share, arithmetic.reduce_scatter_single(op), orders=orders)
        return self._collective(request, outputs)

    # Collectives that move.

    def broadcast(self, tensors: Any, opts: Any = 0, root: int | None = None) -> SimWork:
        """Overwrite tensors with the root's."""
        tensors = _listed(tensors)
        root = _root(opts) if root is None else root
        check_gaps("broadcast", tensors)
        mine = root == self.member
        share, outputs = (_capture(tensors), []) if mine else ([], tensors)
        request = Request("broadcast", tensors, share, arithmetic.broadcast(root), root, orders=orders_in_memory(tensors))
        return self._collective(request, outputs, tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:
        """Gather one tensor of each member into a list, on all members."""
        nested = outputs if isinstance(outputs[0], (list, tuple)) else [outputs]
        return self.allgather_coalesced(nested, _listed(inputs), opts)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, _opts: Any = None) -> SimWork:
        """`allgather` of several tensors."""
        flat = [tensor for gathered in outputs for tensor in gathered]
        sizes = [tensor.numel() for tensor in inputs for _ in self.ranks]
        if [tensor.numel() for tensor in flat] != sizes:
            given = [tensor.numel() for tensor in flat]
            raise ValueError(f"all_gather: outputs of {given} elements, allowed are {sizes}, as the inputs have")
        return self._collective(Request("all_gather", inputs, _capture(inputs), arithmetic.all_gather), flat, outputs)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> SimWork:
        """Gather one tensor of each member into one, on all members."""
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, _opts: Any = None) -> SimWork:
        """`all_gather_single` for several tensors."""
        self._check_sizes("all_gather", inputs, outputs)
        return self._collective(Request("all_gather", inputs, _capture(inputs), arithmetic.all_gather_single), outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = 0) -> SimWork:
        """Gather one tensor of each member into a list on the root."""
        inputs, root = _listed(inputs), _root(opts)
        gathered = list(outputs[0]) if root == self.member else []
        return self._collective(Request("gather", inputs, _capture(inputs), arithmetic.gather(root), root), gathered)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = 0) -> SimWork:
        """Give each member one tensor of the root's list."""
        outputs, root = _listed(outputs), _root(opts)
        given = list(inputs[0]) if root == self.member else []
        check_gaps("scatter", [*outputs, *given])
        orders = common_order("scatter", [*outputs, *given])
        request = Request("scatter", outputs, _capture(given), arithmetic.scatter(root), root, orders=orders)
        return self._collective(request, outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, _opts: Any = None) -> SimWork:
        """Send the i-th tensor to member i."""
        check_list_all_to_all()
        share = (_capture(inputs), [tensor.numel() for tensor in outputs])
        return self._collective(Request("all_to_all", inputs, share, arithmetic.all_to_all, None, False), outputs)

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, output_sizes: Any = None, input_sizes: Any = None, _opts: Any = None
    ) -> SimWork:
        """Send the i-th part along dim 0 to member i; sizes default to equal parts."""
        check_contiguous("all_to_all", [output, source])
        outputs, inputs = self._split(output, output_sizes), self._split(source, input_sizes)
        share = (_capture(inputs), [tensor.numel() for tensor in outputs])
        return self._collective(Request("all_to_all", [source], share, arithmetic.all_to_all, None, False), outputs, [output])

    def barrier(self, opts: Any = None, timeout: Any = None) -> SimWork:  # noqa: ARG002 - torch names them
        """Wait for all members."""
        return self._collective(Request("barrier", [], [], arithmetic.nothing), [])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:  # noqa: ARG002 - torch names them
        """Wait for all members; who is missing is known without waiting for a time limit."""
        self._collective(Request("monitored_barrier", [], [], arithmetic.nothing), []).wait()

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Messages. A send is buffered; its handle completes when the receiver has taken it, so a blocking send waits for that.

    def send(self, tensors: Tensors, receiver: int, tag: int = 0) -> SimWork:
        """Send tensors to another member."""
        check_peer("send", self.member, receiver)
        check_contiguous("send", tensors)
        raw = self._note("send", tensors, self.ranks[receiver])
        parcel = self._exchange.send(self.member, receiver, tag, raw, _capture(tensors))
        return self._keep(SimWork(self, raw, parcel, [], tensors))

    def recv(self, tensors: Tensors, sender: int | None, tag: int = 0) -> SimWork:
        """Receive tensors from another member."""
        check_peer("recv", self.member, sender)
        check_contiguous("recv", tensors)
        raw = self._note("recv", tensors, None if sender is None else self.ranks[sender])
        parcel = self._exchange.receive(self.member, sender, tag, raw)
        with raw_memory():
            for tensor in tensors:
                arithmetic.withhold(tensor)
        work = ReceiveWork(self, raw, parcel, tensors, tensors)
        work.parcel = parcel
        return self._keep(work)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> SimWork:
        """Receive tensors from whichever member sent first."""
        return self.recv(tensors, None, tag)

    # Several calls behind one handle.

    def _start_coalescing(self, _device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, _device: torch.device) -> CoalescedWork:
        works, self._coalesced = self._coalesced or [], None
        return CoalescedWork(works)

    # The common path.

    def _collective(self, request: Request, outputs: Tensors, shown: Any = None) -> SimWork:
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
                    arithmetic.withhold(output)
        return self._keep(SimWork(self, raw, meeting, outputs, outputs if shown is None else shown))

    def _note(self, op: str, tensors: Tensors, peer: int | None) -> RawCall:
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

    def _check_sizes(self, op: str, parts: Tensors, wholes: Tensors) -> None:
        for part, whole in zip(parts, wholes, strict=True):
            if part.numel() * len(self.ranks) != whole.numel() or part.dtype != whole.dtype:
                raise ValueError(
                    f"{op}: part {part.dtype} {list(part.shape)} does not go into whole {whole.dtype} {list(whole.shape)}, "
                    f"which must have its type and {len(self.ranks)} times its elements"
                )

    def _split(self, tensor: torch.Tensor, sizes: Any) -> Tensors:
        if sizes:
            return list(torch.split(tensor, list(sizes)))
        if tensor.shape[0] % len(self.ranks):
            raise ValueError(f"all_to_all: dim 0 is {tensor.shape[0]}, allowed without sizes are multiples of {len(self.ranks)}")
        return list(torch.split(tensor, [tensor.shape[0] // len(self.ranks)] * len(self.ranks)))


def _listed(tensors: Any) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _root(opts: Any) -> int:
    return int(opts) if isinstance(opts, int) else int(opts.rootRank)


def _capture(tensors: Tensors) -> Tensors:
    with raw_memory():
        return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]


def _reduction(opts: Any, tensors: Tensors) -> tuple[str, Tensors]:
    reduce_op = getattr(opts, "reduceOp", opts)
    op = _OPS[getattr(reduce_op, "op", reduce_op)]
    return op, _capture(tensors)
