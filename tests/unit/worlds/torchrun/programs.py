"""Programs for ranks."""

from __future__ import annotations

import os
import random
import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from equivcheck.programs.nouns import Leaf, Operation, TensorProgram
from equivcheck.scenario import DDP, Axis, Data, Layer, Layout, Mesh, Model, Scenario, Training

CHANGED = "EQUIVCHECK_TEST_CHANGED"
"""An environment variable."""


def scenario(ranks: int) -> Scenario:
    """The smallest scenario with data-parallel ranks."""
    training = Training(model=Model(features=2, layers=(Layer(width=2),)), data=Data(microbatches=(ranks,)), steps=2)
    return Scenario(training=training, layout=Layout(mesh=Mesh(axes=(Axis(name="dp", size=ranks),)), parallelisms=(DDP(),)))


def tensor_program(ranks: int) -> TensorProgram:
    """One operation on a row-sharded matrix."""
    leaf = Leaf(shape=(4, 6), placements=("S(0)",))
    return TensorProgram(mesh=(ranks,), statements=(leaf, Operation(name="softmax", dim=-1)))


def distributed(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A user's parallelisation."""
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())


def change_state() -> None:
    """Leave the process changed."""
    torch.set_default_dtype(torch.float64)
    torch.rand(3)
    random.random()
    os.environ[CHANGED] = "1"
    os.chdir("/")


def state() -> tuple[object, ...]:
    """The calling process's state."""
    return (
        torch.get_default_dtype(),
        torch.default_generator.get_state().tolist(),
        random.getstate(),
        os.environ.get(CHANGED),
        os.getcwd(),
    )


def group_of_rank() -> int:
    """The default group's identity."""
    return id(dist.group.WORLD)


def raise_on_last() -> None:
    """Raise on one rank, for which the others wait."""
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError(f"boom on {socket.gethostname()}")
    dist.barrier()


def wait_on_first() -> None:
    """Leave the first rank waiting."""
    if dist.get_rank() == 0:
        dist.barrier()
