"""Numbers rounded to bfloat16 on their way.

Private torch API (`ReduceScatter`, what FSDP2 takes for a reduction of one's own); tried on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from equivcheck.mutants.axes import stepped
from equivcheck.mutants.reductions import averaged_in, reduce_by
from equivcheck.train.setup import Setup


class _InBfloat16(ReduceScatter):
    """Sums in bfloat16 what it is given in another element type."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of the type that is asked for."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,  # noqa: ARG002 - done at once
    ) -> None:
        """Reduce and scatter at once."""
        low = output_tensor.to(torch.bfloat16)
        dist.reduce_scatter_tensor(low, input_tensor.to(torch.bfloat16), op=op, group=group)
        output_tensor.copy_(low)


def reduce_in_bfloat16(setup: Setup) -> None:
    """Let gradients be summed in bfloat16, whatever the layout says."""
    reduce_by(setup, _averaged_in_bfloat16)
    for module in setup.model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(_InBfloat16())


def _averaged_in_bfloat16(bucket: GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    return averaged_in(torch.bfloat16, bucket, group)


def keep_masters_in_bfloat16(setup: Setup) -> None:
    """Round what the optimizer has updated, as if parameters were kept in bfloat16."""
    update = setup.update

    def update_and_round(optimizer: torch.optim.Optimizer) -> None:
        update(optimizer)
        _round_all(optimizer)

    setup.update = update_and_round


def _round_all(optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for parameter in stepped(optimizer):
            parameter.copy_(parameter.to(torch.bfloat16))
