"""Faults planted into the setup of a rank: each makes a parallel training wrong in one way that real code has got wrong."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from equivcheck.layouts.distributing import distribute_batch
from equivcheck.train.material import Batch
from equivcheck.train.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault and where it can be planted."""

    name: str
    """What is wrong."""
    layout: str
    """Tag of the layout in which it is planted."""
    plant: Callable[[Setup], None]
    """Changes the setup of a rank."""


def sum_instead_of_mean(setup: Setup) -> None:
    """Make DDP's hook reduce without dividing."""
    assert isinstance(setup.module, DistributedDataParallel)
    group = setup.module.process_group

    def reduce(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])  # type: ignore[no-any-return]

    setup.module.register_comm_hook(None, reduce)


def leave_one_parameter_out(setup: Setup) -> None:
    """Keep the last trained parameter's gradient as this rank alone computed it."""
    parameter = [parameter for parameter in setup.model.parameters() if parameter.requires_grad][-1]
    own: list[torch.Tensor] = []
    parameter.register_hook(lambda gradient: own.append(gradient.detach().clone()))

    def put_back(optimizer: torch.optim.Optimizer, step: int) -> None:
        if parameter.grad is not None and own:
            parameter.grad = torch.stack(own).sum(0)
        own.clear()

    setup.before_update.append(put_back)


def divide_twice(setup: Setup) -> None:
    """Divide FSDP2's averaged gradients by the number of ranks once more."""

    def divide(optimizer: torch.optim.Optimizer, step: int) -> None:
        for parameter in setup.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(dist.get_world_size())

    setup.before_update.append(divide)


def add_row_bias_everywhere(setup: Setup) -> None:
    """Add the bias of a row-parallel linear on every rank before the sum rather than once."""
    for name, module in setup.model.named_modules():
        weight = getattr(module, "weight", None)
        by_rows = isinstance(weight, DTensor) and weight.placements == (Shard(1),)
        if name.endswith(".linear") and by_rows and module.bias is not None:
            module.register_forward_hook(_add_bias)


def _add_bias(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    bias = module.bias
    assert isinstance(bias, DTensor)
    return output + (dist.get_world_size() - 1) * bias.full_tensor()


def whole_batch_everywhere(setup: Setup) -> None:
    """Give every rank the whole batch as if it were its own part."""
    mesh = next(parameter.device_mesh for parameter in setup.model.parameters() if isinstance(parameter, DTensor))

    def take(batch: Batch) -> Batch:
        return distribute_batch(batch, mesh)

    setup.take = take


def lose_momentum(setup: Setup) -> None:
    """Forget the optimizer's state at each step."""
    setup.before_step.append(lambda optimizer, step: optimizer.state.clear())


def skip_a_collective(setup: Setup) -> None:
    """Let rank 1 leave out the reduction of its gradients."""
    assert isinstance(setup.module, DistributedDataParallel)
    if dist.get_rank() == 1:
        module = setup.module
        setup.accumulation = lambda last: module.no_sync()


FAULTS = (
    Fault(name="DDP hook sums instead of averaging", layout="ddp", plant=sum_instead_of_mean),
    Fault(name="one parameter left out of the reduction", layout="ddp", plant=leave_one_parameter_out),
    Fault(name="FSDP2 gradient divided twice", layout="fsdp2", plant=divide_twice),
    Fault(name="row-parallel bias added on every rank", layout="tensor_parallel", plant=add_row_bias_everywhere),
    Fault(name="SPMD batch given whole to every rank", layout="spmd", plant=whole_batch_everywhere),
    Fault(name="momentum lost at each step", layout="fsdp2", plant=lose_momentum),
    Fault(name="one rank skips a collective", layout="ddp", plant=skip_a_collective),
)
