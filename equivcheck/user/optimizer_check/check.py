"""`check_optimizer`: compare a distributed or handwritten optimizer with one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.user.optimizer_check.result import OptimizerVerdict
    from equivcheck.user.resuming.restart import Checkpointing
    from equivcheck.worlds.ranks import Ranks
    from equivcheck.worlds.world import World


def check_optimizer(  # noqa: PLR0913 - one for each thing that users bring, all by keyword
    optimizer: Callable[..., Any],
    reference: Callable[[list[Any]], Any] | None = None,
    *,
    mesh: Mapping[str, int],
    placements: Sequence[str] = ("replicated", "fsdp2", "dim 1"),
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module | None] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    cases: int = 12,
    steps: int = 4,
    save: Checkpointing | None = None,
    load: Checkpointing | None = None,
    name: str = "",
    dtype: torch.dtype | None = torch.float64,
    seed: int = 0,
    world: str | Ranks | World = "sim",
    schedule_seed: int = 0,
    deadline: float = 60.0,
    explain: bool = True,
) -> OptimizerVerdict:
    """Check whether an optimizer makes the same updates on ranks as a reference on one device.

    Parameters have drawn shapes: vectors, one row, fewer rows than ranks, uneven shards, a fused weight for query, key and value.
    Gradients are drawn, too, so there is no model and no loss. Every step's parameters, and the final state, must agree::

        verdict = check_optimizer(
            lambda parameters: DistributedMuon(parameters, lr=0.02),
            lambda parameters: torch.optim.Muon(parameters, lr=0.02),
            mesh={"dp": 2},
            placements=("fsdp2",),
            shapes={"query.weight": (6, 4), "up.weight": (5, 3)},  # torch's Muon refuses vectors
        )
        verdict.assert_equivalent()

    :param optimizer: Called on each rank with a list of parameters. If its argument has the name ``named_parameters``, the list
        has pairs ``(name, parameter)``. If it has an argument ``mesh``, it gets the mesh. Returns an optimizer.
    :param reference: The same optimizer for one device. If None, `optimizer` is used, and gets None as its ``mesh``.
    :param mesh: Axis names and sizes. Gradients are equal on all ranks, as after a reduction.
    :param placements: How ranks hold parameters, from ``"replicated"``, ``"fsdp2"`` (dim 0) and ``"dim 1"``.
    :param parallelize: Called as ``parallelize(model, mesh)`` to distribute the parameters. It replaces `placements`. The model
        has parameters but no forward.
    :param shapes: Names and shapes of all parameters, instead of drawn parameters.
    :param cases: Number of drawn cases.
    :param steps: Number of steps in each case.
    :param save: Called as ``save(model, optimizer, None, folder)`` in half of the cases, after half of the steps. None stands
        for a scheduler. By default the optimizer's ``state_dict()`` and parameters are copied on each rank.
    :param load: Called as ``load(model, optimizer, None, folder)`` with a new model and a new optimizer.
    :param name: Name of this check, for the verdict's first line.
    :param dtype: Type for parameters and gradients. None for float64.
    :param seed: Seed for shapes, parameters and gradients.
    :param world: ``"sim"``, ``"gloo"``, or ranks that are already running.
    :param schedule_seed: Seed for the order in which simulated ranks take turns.
    :param deadline: Seconds after which ranks count as hung.
    :param explain: Shrink the first case that differs, and search for its cause.
    :raises UsageError: An argument is not valid.
    """
    # Imported here because they import DTensor.
    from equivcheck.user.optimizer_check.checking import OptimizerCheck

    return OptimizerCheck(
        optimizer=optimizer,
        reference=optimizer if reference is None else reference,
        mesh=mesh,
        placements=tuple(placements),
        parallelize=parallelize,
        shapes=shapes,
        num_cases=cases,
        steps=steps,
        save=save,
        load=load,
        name=name,
        dtype=dtype,
        seed=seed,
        world=world,
        schedule_seed=schedule_seed,
        deadline=deadline,
        explain=explain,
    ).run()
