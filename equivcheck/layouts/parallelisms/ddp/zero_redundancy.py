"""`torch.distributed.optim.ZeroRedundancyOptimizer`: one rank updates each parameter and keeps its optimizer state."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh

from equivcheck.scenario import Training
from equivcheck.training.read import State
from equivcheck.training.setup import Setup
from equivcheck.training.update.optimizer import optimizer_parts

with warnings.catch_warnings():
    # Other optimizers in this package call the deprecated torch.jit.script during import.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


def use_zero_redundancy(setup: Setup, mesh: DeviceMesh, *, parameters_as_bucket_view: bool) -> None:
    """Distribute the updates of parameters over the mesh's ranks by `ZeroRedundancyOptimizer`.

    Each rank still has full parameters.
    """
    group = mesh.get_group()

    def build(training: Training, parameters: Iterable[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        parts = optimizer_parts(training, parameters)
        return ZeroRedundancyOptimizer(
            parts.groups,
            optimizer_class=parts.kind,
            process_group=group,
            parameters_as_bucket_view=parameters_as_bucket_view,
            **parts.arguments,
        )

    setup.build_optimizer = build
    setup.state_of = local_state


def local_state(optimizer: torch.optim.Optimizer) -> State:
    """Return optimizer state for the parameters updated by this rank."""
    assert isinstance(optimizer, ZeroRedundancyOptimizer), "the layout builds it"
    state: State = optimizer.optim.state
    return state
