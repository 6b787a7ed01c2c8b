"""Reducing collectives on a simulated group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from equivcheck.worlds.sim import arithmetic
from equivcheck.worlds.sim.exchange import Request
from equivcheck.worlds.sim.group.calls import GroupCalls, Tensors, as_list, copies_of, reduction_of, root_of
from equivcheck.worlds.sim.group.shapes import check_one, check_part, check_some, check_wholes
from equivcheck.worlds.sim.refusals import check_gaps, check_sparse, check_strided, common_order, orders_in_memory
from equivcheck.worlds.sim.work import SimWork

_SUM = dist.ReduceOp.SUM
_Options = Any


class Reductions(GroupCalls):
    """Collectives in a simulated group that reduce tensors."""

    def allreduce(self, tensors: Any, opts: _Options = _SUM, timeout: Any = None, *, op: Any = None) -> SimWork:  # noqa: ARG002
        """Reduce a tensor in place on all members."""
        tensors, opts = as_list(tensors), opts if op is None else op
        check_one("all_reduce", tensors)
        if tensors[0].layout is torch.sparse_coo:
            return self._sum_sparse(tensors, reduction_of(opts))
        return self._reduce_on_all(tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: _Options = _SUM) -> SimWork:
        """Reduce several tensors in place on all members."""
        tensors = as_list(tensors)
        check_some("all_reduce", tensors)
        return self._reduce_on_all(tensors, opts)

    def _reduce_on_all(self, tensors: Tensors, opts: _Options) -> SimWork:
        check_gaps("all_reduce", tensors)
        op, orders = reduction_of(opts), orders_in_memory(tensors)
        share = copies_of(tensors)
        return self._collective(Request(f"all_reduce.{op}", tensors, share, arithmetic.all_reduce(op), orders=orders), tensors)

    def _sum_sparse(self, tensors: Tensors, op: str) -> SimWork:
        (tensor,) = tensors
        check_sparse(op, tensor)
        request = Request("sparse_all_reduce.sum", tensors, [tensor.detach().clone().coalesce()], arithmetic.sum_sparse)
        return self._collective(request, tensors)

    def reduce(
        self,
        tensors: Any,
        opts: _Options = 0,
        op: Any = _SUM,
        timeout: Any = None,  # noqa: ARG002
        *,
        root: int | None = None,
    ) -> SimWork:
        """Reduce a tensor over all members. Only the root (by default the first member) gets the result, in place."""
        tensors = as_list(tensors)
        check_one("reduce", tensors)
        check_gaps("reduce", tensors)
        root = root_of(opts) if root is None else root
        name, orders = reduction_of(getattr(opts, "reduceOp", op)), orders_in_memory(tensors)
        share = copies_of(tensors)
        outputs = tensors if root == self.member else []
        return self._collective(
            Request(f"reduce.{name}", tensors, share, arithmetic.reduce(name, root), root, orders=orders), outputs
        )

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: _Options = _SUM, timeout: Any = None) -> SimWork:  # noqa: ARG002
        """Reduce a list of tensors, one for each member, over all members. Member i gets the i-th reduced tensor."""
        given = inputs if isinstance(inputs[0], (list, tuple)) else [inputs]
        outputs = as_list(outputs)
        check_one("reduce_scatter", outputs)
        check_one("reduce_scatter", given)
        parts = list(given[0])
        check_part("reduce_scatter", outputs[0], parts, self.member, len(self.ranks))
        check_gaps("reduce_scatter", outputs)
        common_order("reduce_scatter", [parts[self.member], *outputs])
        check_strided("reduce_scatter", parts)
        op, orders = reduction_of(opts), orders_in_memory(parts)
        share = copies_of(parts)
        request = Request(f"reduce_scatter.{op}", parts, share, arithmetic.reduce_scatter(op), orders=orders)
        work = self._collective(request, outputs)
        self._exchange.hidden[self.member] += 1  # gloo sends sizes first
        return work

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: _Options = _SUM) -> SimWork:
        """Reduce `source` over all members. Each member gets an equal part of the result along dim 0."""
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: _Options = _SUM) -> SimWork:
        """Reduce several tensors over all members. Each member gets an equal part of each result along dim 0."""
        check_wholes("reduce_scatter", outputs, inputs, len(self.ranks))
        check_strided("reduce_scatter", inputs)
        op, orders = reduction_of(opts), orders_in_memory(inputs)
        share = copies_of(inputs)
        request = Request(f"reduce_scatter.{op}", inputs, share, arithmetic.reduce_scatter_single(op), orders=orders)
        return self._collective(request, outputs)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
