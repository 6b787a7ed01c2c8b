"""One rank of a world without peers: that of torch and that of this package, for worlds of any size."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from collectives.gradient_programs import gather_single, scatter_single
from equivcheck.worlds.fake.ranks import FakeRanks
from equivcheck.worlds.sim.torch_private import keep_device_guard


def in_torchs_fake(size: int, rank: int, program: Callable[..., Any], *arguments: Any) -> Any:
    """What a program returns on a rank of the ``fake`` backend, in a thread of its own, which keeps no groups."""
    found: list[Any] = []

    def serve() -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            found.append(program(*arguments))
        except Exception as error:
            found.append(error)
        finally:
            dist.destroy_process_group()

    keep_device_guard()
    thread = threading.Thread(target=serve)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        thread.start()
        thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def in_fake_world(size: int, rank: int, program: Callable[..., Any], *arguments: Any) -> Any:
    """The same in this package's fake world."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FakeRanks(size, rank).run(program, *arguments).values[0]


TRACED: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "all_reduce": lambda tensor, group: functional.all_reduce(tensor, "sum", group),
    "broadcast": lambda tensor, group: functional.broadcast(tensor, 0, group),
    "all_gather_into_tensor": lambda tensor, group: gather_single(tensor, 0, group),
    "reduce_scatter_tensor": lambda tensor, group: scatter_single(tensor, "sum", 0, group),
    "all_to_all_single": lambda tensor, group: functional.all_to_all_single(tensor, None, None, group),
}
"""Functional collectives by the name of their operator."""


def trace(name: str, shape: tuple[int, ...]) -> tuple[list[str], tuple[int, ...]]:
    """The operators of a traced collective, in order, and the shape of what it gives."""
    graph = make_fx(lambda tensor: TRACED[name](tensor, dist.group.WORLD))(torch.zeros(shape))
    called = [node for node in graph.graph.nodes if node.op == "call_function"]
    return [node.target.__name__.partition(".")[0] for node in called], tuple(called[-1].meta["val"].shape)
