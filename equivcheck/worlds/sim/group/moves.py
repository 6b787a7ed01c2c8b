"""Collectives without a reduction, and barriers."""

from __future__ import annotations

from typing import Any

import torch

from equivcheck.worlds.sim import arithmetic
from equivcheck.worlds.sim.exchange import Request
from equivcheck.worlds.sim.group.calls import GroupCalls, Tensors, as_list, copies_of, root_of
from equivcheck.worlds.sim.group.shapes import check_list, check_one, check_wholes
from equivcheck.worlds.sim.refusals import (
    CallRefused,
    check_contiguous,
    check_gaps,
    check_list_all_to_all,
    check_strided,
    common_order,
    orders_in_memory,
)
from equivcheck.worlds.sim.work import BarrierWork, SimWork


class Moves(GroupCalls):
    """Collectives in a simulated group that move data without reducing it."""

    def broadcast(self, tensors: Any, opts: Any = 0, root: int | None = None, timeout: Any = None) -> SimWork:  # noqa: ARG002
        """Overwrite the tensor in `tensors` with the root's tensor."""
        tensors = as_list(tensors)
        root = root_of(opts) if root is None else root
        check_one("broadcast", tensors)
        check_gaps("broadcast", tensors)
        share, outputs = (copies_of(tensors), []) if root == self.member else ([], tensors)
        request = Request("broadcast", tensors, share, arithmetic.broadcast(root), root, orders=orders_in_memory(tensors))
        return self._collective(request, outputs, tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> SimWork:  # noqa: ARG002
        """Gather a tensor from each member. Every member gets all of them as a list."""
        inputs = as_list(inputs)
        check_one("all_gather", inputs)
        gathered = outputs[0] if isinstance(outputs[0], (list, tuple)) else outputs
        check_list("all_gather", "outputs", gathered, inputs[0], len(self.ranks))
        return self._gather_on_all(inputs, list(gathered))

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, _opts: Any = None) -> SimWork:
        """Gather several tensors from each member. `outputs` has a list for each member, with one tensor for each input."""
        if len(outputs) != len(self.ranks) or any(len(theirs) != len(inputs) for theirs in outputs):
            lengths = [len(theirs) for theirs in outputs]
            expected = f"Expected one list for each member, with {len(inputs)} tensors each."
            raise CallRefused(f"all_gather: outputs of lengths {lengths} are not valid. {expected}")
        by_tensor = [list(gathered) for gathered in zip(*outputs, strict=True)]
        for source, gathered in zip(inputs, by_tensor, strict=True):
            check_list("all_gather", "outputs", gathered, source, len(self.ranks))
        return self._gather_on_all(inputs, [tensor for gathered in by_tensor for tensor in gathered])

    def _gather_on_all(self, inputs: Tensors, outputs: Tensors) -> SimWork:
        check_strided("all_gather", inputs)
        return self._collective(Request("all_gather", inputs, copies_of(inputs), arithmetic.all_gather), outputs)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> SimWork:
        """Gather a tensor from each member. Every member gets all of them, concatenated along dim 0 of `output`."""
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, _opts: Any = None) -> SimWork:
        """Gather several tensors from each member.

        Output i gets input i from all members, concatenated along dim 0.
        """
        check_wholes("all_gather", inputs, outputs, len(self.ranks))
        check_strided("all_gather", inputs)
        return self._collective(Request("all_gather", inputs, copies_of(inputs), arithmetic.all_gather_single), outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = 0, root: int | None = None) -> SimWork:
        """Gather a tensor from each member. Only the root gets all of them, as a list."""
        inputs, root = as_list(inputs), root_of(opts) if root is None else root
        check_one("gather", inputs)
        check_strided("gather", inputs)
        gathered = self._list_of_root("gather", outputs, root)
        if root == self.member:
            check_list("gather", "outputs", gathered, inputs[0], len(self.ranks))
        return self._collective(Request("gather", inputs, copies_of(inputs), arithmetic.gather(root), root), gathered)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = 0, root: int | None = None) -> SimWork:
        """Send the i-th tensor in the root's list to member i."""
        outputs, root = as_list(outputs), root_of(opts) if root is None else root
        check_one("scatter", outputs)
        given = self._list_of_root("scatter", inputs, root)
        if root == self.member:
            check_list("scatter", "inputs", given, outputs[0], len(self.ranks))
        check_gaps("scatter", [*outputs, *given])
        orders = common_order("scatter", [*outputs, *given])
        share = copies_of(given)
        return self._collective(Request("scatter", outputs, share, arithmetic.scatter(root), root, orders=orders), outputs)

    def _list_of_root(self, op: str, tensors: Any, root: int) -> Tensors:
        """Return the tensor list on the root, possibly nested in another list; empty on other members."""
        if root != self.member:
            if tensors:
                raise CallRefused(
                    f"{op}: a tensor list on rank {self.member} of the group is not valid. "
                    f"Expected a list only on the root, rank {root}."
                )
            return []
        return list(tensors[0] if tensors and isinstance(tensors[0], (list, tuple)) else tensors)

    def alltoall(self, outputs: Tensors, inputs: Tensors, _opts: Any = None) -> SimWork:
        """Send the i-th tensor in `inputs` to member i, and receive a tensor from each member in `outputs`."""
        check_list_all_to_all()
        check_list("all_to_all", "inputs", inputs, inputs[0] if inputs else torch.empty(0), len(self.ranks))
        check_list("all_to_all", "outputs", outputs, inputs[0], len(self.ranks))
        check_strided("all_to_all", [*inputs, *outputs])
        share = (copies_of(inputs), [tensor.numel() for tensor in outputs])
        return self._collective(Request("all_to_all", inputs, share, arithmetic.all_to_all, None, False), outputs)

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, output_sizes: Any = None, input_sizes: Any = None, _opts: Any = None
    ) -> SimWork:
        """Send the i-th part of `source` to member i, and receive a part of `output` from each member.

        The parts lie along dim 0. They have equal sizes if `input_sizes` and `output_sizes` are None.
        """
        check_strided("all_to_all", [output, source])
        check_contiguous("all_to_all", [output, source])
        if output.dtype != source.dtype:
            raise CallRefused(f"all_to_all: output {output.dtype} is not valid for input {source.dtype}. Expected equal dtypes.")
        outputs, inputs = self._split(output, output_sizes), self._split(source, input_sizes)
        share = (copies_of(inputs), [tensor.numel() for tensor in outputs])
        return self._collective(Request("all_to_all", [source], share, arithmetic.all_to_all, None, False), outputs, [output])

    def _split(self, tensor: torch.Tensor, sizes: Any) -> Tensors:
        if sizes:
            return list(torch.split(tensor, list(sizes)))
        size = len(self.ranks)
        if not tensor.dim() or tensor.shape[0] % size:
            text = "some torch versions split other numbers of rows wrongly over gloo"
            raise CallRefused(
                f"all_to_all: shape {list(tensor.shape)} is not valid without split sizes. "
                f"Expected a multiple of {size} rows ({text})."
            )
        return list(torch.split(tensor, [tensor.shape[0] // size] * size))

    def barrier(self, opts: Any = None, timeout: Any = None) -> SimWork:  # noqa: ARG002 - torch names them
        """Wait until all members have called `barrier` and the calling rank's earlier collectives have completed."""
        return self._collective(Request("barrier", [], [], arithmetic.nothing), [], None, BarrierWork)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:  # noqa: ARG002 - torch names them
        """Wait until all members have called `monitored_barrier`.

        `timeout` is ignored, because the scheduler notices if a member never calls.
        """
        self._collective(Request("monitored_barrier", [], [], arithmetic.nothing), []).wait()
        self._exchange.hidden[self.member] += 1 if self.member else 2 * len(self.ranks) - 3  # gloo sends messages instead

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single
