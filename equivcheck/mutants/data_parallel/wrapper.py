"""Wrong uses of `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch.nn.parallel import DistributedDataParallel

from equivcheck.mutants.comm_hooks import average_bucket, ddp_of, keep_bucket, reduce_with, sum_bucket, zero_bucket
from equivcheck.mutants.mutant import fault
from equivcheck.mutants.needs import WITH_DDP_STAGES, reduces_all_by_hooks, reduces_by_hooks
from equivcheck.mutants.rank import mesh_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import DDP, AuxiliaryLinear, Scenario
from equivcheck.scenario.mesh import TP
from equivcheck.training.setup import Setup


def _looks_for_unused(scenario: Scenario) -> bool:
    looks = any((parallelism.find_unused_parameters or parallelism.static_graph) for parallelism in scenario.layout.of(DDP))
    auxiliaries = [layer.auxiliary for layer in scenario.training.model.layers if not layer.frozen]
    has_unused = AuxiliaryLinear.NEVER in auxiliaries or (
        AuxiliaryLinear.EVEN_STEPS in auxiliaries and scenario.training.steps > 1
    )
    return reduces_by_hooks(scenario) and looks and has_unused


@fault(layouts=WITH_DDP_STAGES, applies=reduces_all_by_hooks, causes=(Cause.NOT_REDUCED,))
def reduction_missing(setup: Setup) -> None:
    """Bug: the gradient all-reduce never runs, so each rank updates with its own gradients."""
    reduce_with(setup, keep_bucket)


@fault(layouts=WITH_DDP_STAGES, applies=reduces_all_by_hooks, causes=(Cause.SUMMED, Cause.SCALED))
def gradients_summed(setup: Setup) -> None:
    """Bug: gradients are summed over ranks, but not divided by their number."""
    reduce_with(setup, sum_bucket)


@fault(layouts=WITH_DDP_STAGES, applies=reduces_all_by_hooks, causes=(Cause.NOT_REDUCED,))
def last_bucket_kept(setup: Setup) -> None:
    """Bug: the last gradient bucket is not reduced."""
    reduce_with(setup, lambda bucket, group: (keep_bucket if bucket.is_last() else average_bucket)(bucket, group))


@fault(layouts=WITH_DDP_STAGES, applies=reduces_all_by_hooks, causes=(Cause.GRADIENT_LOST,))
def last_bucket_lost(setup: Setup) -> None:
    """Bug: the last gradient bucket is replaced with zeros."""
    reduce_with(setup, lambda bucket, group: zero_bucket(bucket, group) if bucket.is_last() else average_bucket(bucket, group))


@fault(
    layouts=("ddp x tensor_parallel", "replicate x tensor_parallel"),
    applies=reduces_by_hooks,
    # With unequal shards, buckets have different sizes and the ranks wait for each other.
    causes=(Cause.REDUCED_OVER_PART, Cause.NOT_REDUCED, Cause.CALLS_DIFFER),
)
def reduced_over_other_axis(setup: Setup) -> None:
    """Bug: gradients are averaged over tensor-parallel ranks instead of data-parallel ranks."""
    group = mesh_of(setup).get_group(TP)
    reduce_with(setup, lambda bucket, _group: average_bucket(bucket, group))


@fault(layouts=("ddp", "ddp x tensor_parallel"), applies=reduces_by_hooks, causes=(Cause.NOT_REDUCED,))
def forward_without_sync(setup: Setup) -> None:
    """Bug: forward runs under `no_sync`, backward does not. Gradients are not reduced, because DDP decides in the forward."""
    module, inner = ddp_of(setup), setup.forward_context
    if module is None:
        return

    @contextmanager
    def without_sync() -> Iterator[None]:
        with inner(), module.no_sync():
            yield

    setup.forward_context = without_sync


@fault(layouts=("ddp", "ddp x pipeline"), applies=reduces_by_hooks, causes=(Cause.NOT_REDUCED,))
def inner_module_called(setup: Setup) -> None:
    """Bug: the wrapped module is called instead of the DDP wrapper, or becomes a pipeline stage, so its hooks never run."""
    setup.parts = [part.module if isinstance(part, DistributedDataParallel) else part for part in setup.parts]


@fault(
    layouts=("ddp",),
    applies=_looks_for_unused,
    # DDP raises one step later.
    causes=(Cause.NOT_REDUCED, Cause.RANK_FAILED),
)
def unused_parameters_not_found(setup: Setup) -> None:
    """Bug: a layer is unused in a step but `find_unused_parameters` is off, so its bucket is never reduced."""
    before = setup.parts[0]
    if not isinstance(before, DistributedDataParallel):
        return
    with setup.accumulation(False):
        skips = not before.require_backward_grad_sync
    module = DistributedDataParallel(
        before.module, process_group=before.process_group, bucket_cap_mb=before.bucket_bytes_cap / 2**20
    )
    setup.parts = [module]
    setup.accumulation = lambda last: module.no_sync() if skips and not last else nullcontext()
