"""Results of functional collectives in other calls. Torch's dispatcher waits for them before gloo gets them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from equivcheck.worlds.sim.ranks import SimRanks

World = Callable[[int], SimRanks]


def pending_sum() -> torch.Tensor:
    """Return the sum of 1 and 2 over two ranks. No operation has waited for it yet."""
    return collectives.all_reduce(torch.full((2,), dist.get_rank() + 1.0), "sum", dist.group.WORLD)


def test_a_result_is_sent(world: World) -> None:
    """Pipeline stages send outputs of `RowwiseParallel` that no operation has waited for."""

    def program() -> list[float]:
        pending, received = pending_sum(), torch.zeros(2)
        if dist.get_rank():
            dist.recv(received, 0)
        else:
            dist.send(pending, 1)
        return received.tolist()

    assert world(2).run(program).values == ([0.0, 0.0], [3.0, 3.0])


def test_a_result_is_reduced_in_place(world: World) -> None:
    """The tensor that the functional collective returned has the new value."""

    def program() -> list[float]:
        pending = pending_sum()
        dist.all_reduce(pending)
        return (pending + 0).tolist()

    assert world(2).run(program).values == ([6.0, 6.0], [6.0, 6.0])


def test_results_are_gathered(world: World) -> None:
    """Inputs in lists are waited for, too."""

    def program() -> list[list[float]]:
        parts = [torch.zeros(2), torch.zeros(2)]
        dist.all_gather(parts, pending_sum())
        output = torch.zeros(2)
        dist.reduce_scatter(output, [pending_sum(), pending_sum()])
        return [part.tolist() for part in [*parts, output]]

    assert world(2).run(program).values == ([[3.0, 3.0], [3.0, 3.0], [6.0, 6.0]],) * 2
