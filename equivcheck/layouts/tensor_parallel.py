"""`torch.distributed.tensor.parallel.parallelize_module`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from equivcheck.layouts.foreseen.foresight import Foresight
from equivcheck.layouts.foreseen.tensor_parallel import TENSOR_PARALLEL_FORESIGHT
from equivcheck.layouts.kind import LayoutKind, Limit
from equivcheck.layouts.limits import DTENSOR_OPTIMIZERS, NO_COUNTS_IN_GRAPHS, keeps_dtensors, parallelism_of
from equivcheck.layouts.plans import RULES, LayerSite, PlanRule, fits, fitted, places
from equivcheck.layouts.repairs import has_shares, without_shares
from equivcheck.layouts.whole_parameters import WHOLE_PARAMETERS
from equivcheck.scenario import ASGD, Implementation, Layout, Parallelism, Split, Spread, TensorParallel, Training
from equivcheck.scenario.mesh import TP

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.train.setup import Setup


def _first_broken(rule: PlanRule, training: Training, layout: Layout) -> LayerSite | None:
    plan = parallelism_of(layout, TensorParallel).plan
    if not fits(training.model, plan):
        return None
    rows = tuple(rows // layout.num_data_ranks for rows in training.data.microbatches)
    found = places(training.model, plan, layout.mesh.size(TP), rows)
    return next((place for place, entry in zip(found, plan, strict=True) if rule.broken(place, entry)), None)


def _limit(rule: PlanRule) -> Limit:
    def applies(training: Training, layout: Layout) -> bool:
        return _first_broken(rule, training, layout) is not None

    def repair(training: Training, layout: Layout) -> Training:
        place = _first_broken(rule, training, layout)
        return training if place is None else rule.repair(training, layout, place)

    return Limit(reason=rule.reason, applies=applies, repair=repair, upstream=rule.upstream)


ONE_ENTRY_A_LAYER = Limit(
    reason="tensor parallelism: the plan must have one entry for each layer of the model",
    applies=lambda training, layout: not fits(training.model, parallelism_of(layout, TensorParallel).plan),
    repair=lambda training, layout: fitted(training, parallelism_of(layout, TensorParallel).plan),
)

NO_SHARED_WEIGHTS = Limit(
    reason="tensor parallelism: parallelize_module makes a new parameter for each module, which unties shared weights",
    applies=lambda training, _layout: has_shares(training.model),
    repair=lambda training, _layout: without_shares(training),
    upstream=True,
)


def _mixes_tensors_in_one_call(training: Training, layout: Layout) -> bool:
    outside = {entry.split is Split.OUTSIDE for entry in parallelism_of(layout, TensorParallel).plan}
    if len(outside) == 1 or not keeps_dtensors(layout) or training.optimizer.implementation is Implementation.FOR_LOOP:
        return False
    # With others around they are all DTensors, of two meshes: only ASGD combines tensors of several parameters then.
    return len(layout.parallelisms) == 1 or isinstance(training.optimizer, ASGD)


NO_MIXED_CALLS = Limit(
    reason="tensor parallelism: foreach and fused optimizers refuse plain parameters, those of layers outside the plan, beside "
    "DTensors, and ASGD refuses DTensors of two meshes",
    applies=_mixes_tensors_in_one_call,
    repair=lambda training, _layout: replace(
        training, optimizer=replace(training.optimizer, implementation=Implementation.FOR_LOOP)
    ),
    upstream=True,
)


class TensorParallelKind(LayoutKind):
    """Splits linears by columns or rows, and activations between layers by rows or features."""

    parallelism: ClassVar[type[Parallelism]] = TensorParallel
    limits: ClassVar[tuple[Limit, ...]] = (
        ONE_ENTRY_A_LAYER,
        NO_SHARED_WEIGHTS,
        *map(_limit, RULES),
        *DTENSOR_OPTIMIZERS,
        *WHOLE_PARAMETERS,
        NO_MIXED_CALLS,
        NO_COUNTS_IN_GRAPHS,
    )
    foresight: ClassVar[Foresight] = TENSOR_PARALLEL_FORESIGHT

    def apply(self, setup: Setup, parallelism: Parallelism, mesh: DeviceMesh) -> None:
        """Parallelize each layer by its plan, and take of each dropout mask what this rank has of the layer's output."""
        from torch.distributed.tensor.parallel import parallelize_module

        from equivcheck.layouts.distributing import settle_gradients
        from equivcheck.layouts.styles import layer_styles, local_masks

        assert isinstance(parallelism, TensorParallel), parallelism
        spread = Spread.WHOLE
        for layer, plan in zip(setup.model.get_submodule("layers").children(), parallelism.plan, strict=True):
            styles = dict(layer_styles(layer, plan, spread))
            if styles:
                parallelize_module(layer, mesh, styles)
            spread = plan.output
        settle_gradients(setup.model.parameters())
        rank, size, inner = mesh.get_local_rank(), mesh.size(), setup.take
        setup.take = lambda batch: local_masks(inner(batch), parallelism.plan, rank, size)
