"""Faults of precision planted into the setup of a rank whose layout says otherwise."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from equivcheck.train.setup import Setup


class _InBfloat16(ReduceScatter):
    """Sums in bfloat16 what it is given in another element type."""

    def allocate(self, size: torch.Size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of the type that is asked for."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Reduce and scatter at once."""
        low = output_tensor.to(torch.bfloat16)
        dist.reduce_scatter_tensor(low, input_tensor.to(torch.bfloat16), op=op, group=group)
        output_tensor.copy_(low)


def reduce_in_bfloat16(setup: Setup) -> None:
    """Let FSDP2 sum gradients in bfloat16, whatever its policy says."""
    for module in setup.model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(_InBfloat16())


def keep_masters_in_bfloat16(setup: Setup) -> None:
    """Round what the optimizer has stepped, as if parameters were kept in bfloat16."""
    setup.before_step.append(lambda optimizer, step: _round_after_each_step(optimizer) if step == 0 else None)


def _round_after_each_step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_step_post_hook(lambda stepped, _args, _kwargs: _round_all(stepped))


def _round_all(optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.copy_(parameter.to(torch.bfloat16))
