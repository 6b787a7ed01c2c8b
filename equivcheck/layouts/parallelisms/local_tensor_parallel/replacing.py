"""Putting the modules of a plan in the place of those of a model."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from equivcheck.layouts.parallelisms.local_tensor_parallel.modules import LocalEmbedding, LocalLinear, LocalNorm
from equivcheck.layouts.parallelisms.local_tensor_parallel.planned_modules import PlannedModule, planned_modules, planned_regions
from equivcheck.layouts.parallelisms.local_tensor_parallel.regions import AxisRanks
from equivcheck.layouts.parallelisms.local_tensor_parallel.routes import COPIED
from equivcheck.layouts.parallelisms.local_tensor_parallel.units_within import LocalRegion, cut_within
from equivcheck.scenario import Collectives, LocalTensorParallel, Split
from equivcheck.training.model import share_weights, tie_head
from equivcheck.training.setup import Setup


def replace_modules(setup: Setup, parallelism: LocalTensorParallel, mesh: DeviceMesh) -> AxisRanks:
    """Replace every module that the plan has, or cut it within; returns the ranks that they move activations over."""
    ranks = _kind(parallelism.collectives)(group=mesh.get_group(), size=mesh.size(), index=mesh.get_local_rank())
    model = setup.training.model
    for planned in planned_modules(model, parallelism):
        setup.model.set_submodule(planned.name, _replaced(setup.model.get_submodule(planned.name), planned, ranks))
    for region in planned_regions(model, parallelism):
        moves = LocalRegion(ranks, region.enter, COPIED, region.leave)
        cut_within(setup.model.get_submodule(f"layers.{region.layer}"), moves, dict(region.dims))
    share_weights(setup.model, model)
    if model.head is not None and model.head.tied and parallelism.head is not Split.OUTSIDE:
        tie_head(setup.model)
    return ranks


def _kind(collectives: Collectives) -> type[AxisRanks]:
    """spmd_types is imported where it is asked for: users bring it."""
    if collectives is Collectives.FUNCTIONAL:
        return AxisRanks
    from equivcheck.layouts.parallelisms.local_tensor_parallel.typed_regions import TypedRanks

    return TypedRanks


def _replaced(full: nn.Module, planned: PlannedModule, ranks: AxisRanks) -> nn.Module:
    if isinstance(full, nn.Embedding):
        assert planned.leave is not None, planned
        return LocalEmbedding(full, ranks, planned.leave, planned.dims[0])
    if isinstance(full, nn.Linear):
        assert planned.enter is not None, planned
        assert planned.leave is not None, planned
        return LocalLinear(full, ranks, planned.enter, planned.leave, planned.dims)
    assert isinstance(full, (nn.LayerNorm, nn.RMSNorm)), full
    return LocalNorm(full, ranks)
