"""Faults planted into the setup of a rank: each makes a parallel training wrong in one way that real code has got wrong."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from equivcheck.mutants.registry import mutant
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


def lose_momentum(setup: Setup) -> None:
    """Forget the optimizer's state at each step."""
    setup.before_step.append(lambda optimizer, step: optimizer.state.clear())


FAULTS = (
    Fault(name="DDP hook sums instead of averaging", layout="ddp", plant=sum_instead_of_mean),
    Fault(name="one parameter left out of the reduction", layout="ddp", plant=leave_one_parameter_out),
    Fault(name="FSDP2 gradient divided twice", layout="fsdp2", plant=divide_twice),
    Fault(name="row-parallel bias added on every rank", layout="tensor_parallel", plant=mutant("row_bias_on_every_rank").plant),
    Fault(name="SPMD batch given whole to every rank", layout="spmd", plant=mutant("whole_batch_on_every_rank").plant),
    Fault(name="momentum lost at each step", layout="fsdp2", plant=lose_momentum),
    Fault(name="one rank skips a collective", layout="ddp", plant=mutant("rank_skips_reduction").plant),
)
