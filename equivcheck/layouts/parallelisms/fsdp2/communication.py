"""Expected calls for `fully_shard`: all-gathers for forward and, after resharding, for backward; then gradient reductions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Generic, TypeVar

from equivcheck.layouts.base.dtensor_experts import dtensor_experts, has_dtensor_experts, is_dtensor_expert
from equivcheck.layouts.base.expected_calls.communication import Totals, add, axes_of
from equivcheck.layouts.base.expected_calls.model import OPTIMIZER_NOT_ELEMENTWISE, CommunicationModel, Unpredicted
from equivcheck.layouts.base.expected_calls.rank_view import Held, Ledger, RankView
from equivcheck.layouts.base.expected_calls.shared import dtensor_clipping, has_kept_gradient, sharding_axes
from equivcheck.layouts.base.expected_calls.torch_versions import FREED_WHILE_RECOMPUTED
from equivcheck.layouts.base.limits.optimizers import is_distributed_muon
from equivcheck.layouts.base.partition import axes_of_shards, shard_dim, shard_shape
from equivcheck.layouts.base.plan.rules import is_outside
from equivcheck.layouts.base.rounding import ITEM_BYTES, computed_in, reduced_in
from equivcheck.layouts.parallelisms.fsdp2.division import (
    averages,
    averaging_ranks,
    has_expert_groups,
    reduce_ops,
)
from equivcheck.layouts.parallelisms.fsdp2.units import Unit, parameter_groups, split_expert_units, split_root, units_of
from equivcheck.scenario import (
    FSDP1,
    FSDP2,
    ElementType,
    ExpertParallel,
    Layout,
    LocalTensorParallel,
    TensorParallel,
    Training,
)
from equivcheck.system.torch_version import is_torch_in
from equivcheck.worlds.trace.stage import Stage

F = TypeVar("F", FSDP1, FSDP2)


class UnitCalls(ABC, Generic[F]):
    """Predicts the collective calls of a training whose parameters are gathered and reduced in units."""

    def __init__(self, view: RankView, fsdp: F, layers_per_unit: int = 1) -> None:
        self.view = view
        self.fsdp: F = fsdp
        precision = view.training.precision
        computed, self.reduced = computed_in(precision, fsdp.mixed_precision), reduced_in(precision, fsdp)
        self.gathered_bytes, self.reduced_bytes = ITEM_BYTES[computed.value], ITEM_BYTES[self.reduced.value]
        self.ledger = Ledger()
        self.units = units_of(view, fsdp.wrapping, layers_per_unit)

    def totals(self) -> Totals:
        """Return the expected collective calls in all steps, without clipping."""
        training = self.view.training
        for step in range(training.steps):
            last = len(training.microbatches_at(step)) - 1
            for number in range(last + 1):
                self._forward(step)
                self._backward(step, last=number == last)
        return self.ledger.totals

    @abstractmethod
    def _forward(self, step: int) -> None:
        """Count the calls in one microbatch's forward."""

    @abstractmethod
    def _backward(self, step: int, last: bool) -> None:
        """Count the calls in one microbatch's backward. `last` marks the step's last microbatch."""


class FSDP2Calls(UnitCalls[FSDP2]):
    """Predicts the collective calls of `fully_shard`, in torch's order."""

    def __init__(self, view: RankView, fsdp: FSDP2) -> None:
        super().__init__(view, fsdp, fsdp.layers_per_unit)
        self.regathered = "" if fsdp.reshard_to is None else self._neighbours(fsdp.reshard_to)
        split = list(split_expert_units(split_root(self.units, fsdp), view.layout))
        sharded = [[held for held in unit.held if held.trained or not fsdp.ignore_frozen] for unit in split]
        units = [replace(unit, held=tuple(held)) for unit, held in zip(split, sharded, strict=True) if held]
        has_groups = has_expert_groups(fsdp, view.layout)
        self.units = tuple(chain.from_iterable(map(parameter_groups, units)) if has_groups else units)

    def _neighbours(self, count: int) -> str:
        """Return the group of neighbours that share resharded parameters."""
        mesh, axis = self.view.layout.mesh, self.view.layout.mesh.names.index(self.view.layout.axes_of(self.fsdp)[-1])

        def group(coordinate: tuple[int, ...]) -> tuple[int, ...]:
            return (*coordinate[:axis], coordinate[axis] // count, *coordinate[axis + 1 :])

        own = group(self.view.coordinate)
        return axes_of(tuple(rank for rank in range(mesh.num_ranks) if group(mesh.coordinate(rank)) == own), mesh)

    def _forward(self, step: int) -> None:
        for unit in self.units:
            self._gather(unit, step)
            unit.gathered = not self.fsdp.reshard_after_forward
            unit.resharded = self.fsdp.reshard_to is not None

    def _backward(self, step: int, last: bool) -> None:
        """Count one backward. Each unit prefetches the previous unit, unless that unit needs no backward."""
        frees = last or self.fsdp.reshard_after_backward
        stays = [unit.gathered and not frees for unit in self.units]
        for number in reversed(range(len(self.units))):
            unit = self.units[number]
            if self.view.differentiates(unit.last_layer, step):
                for needed in (unit, *(self.units[before] for before in self._asked_for(number))):
                    if not needed.is_embedding:
                        self._gather(needed, step)
                stays[number] = unit.gathered and not frees
            if last or not self.fsdp.no_sync:
                self._reduce(unit, step, last)
            unit.gathered, unit.resharded = stays[number], unit.resharded and not frees

    def _asked_for(self, number: int) -> Iterable[int]:
        """Return the units that a unit prefetches.

        It is the unit that ended forward before it, or with explicit_prefetch the previous layer. Of two parameter groups, the
        second one prefetches all groups of the previous modules, and the first one nothing.
        """
        unit = self.units[number]
        first = number - unit.group
        told = self.fsdp.explicit_prefetch and not (unit.is_of_experts or unit.is_root or unit.is_head)
        layers = [before for before in range(first) if not (self.units[before].is_of_experts or self.units[before].is_embedding)]
        if first == 0 or (not (told and layers) and unit.group < unit.num_groups - 1):
            return ()
        last = layers[-1] if told and layers else first - 1
        has_all = (told and layers) or unit.num_groups > 1
        return range(last - self.units[last].group if has_all else last, last + 1)

    def _gather(self, unit: Unit, step: int) -> None:
        """Count an all-gather unless the unit is gathered."""
        parts = self._parts(unit)
        if not unit.gathered and parts > 1:
            axes, num_bytes = self.view.axes(*self._axes(unit)), self._gathered(unit)
            if unit.resharded and self.fsdp.reshard_to is not None:
                axes, num_bytes = self.regathered, num_bytes * parts // self.fsdp.reshard_to
            self.ledger.note(step, "all_gather", axes, num_bytes)
        unit.gathered = True

    def _gathered(self, unit: Unit) -> int:
        """Count the bytes in a rank's padded shards of the unit, in the dtypes in which it is gathered."""
        kept = [held for held in unit.held if self.fsdp.full_precision_norms and held.parameter.is_norm_parameter]
        cast = [held for held in unit.held if held not in kept]
        parts = self._parts(unit)
        return self._part(cast, parts) * self.gathered_bytes + self._part(kept, parts) * self.view.item_bytes

    def _part(self, parameters: Iterable[Held], parts: int) -> int:
        """Count the elements in a rank's padded shards of some parameters."""
        return sum(held.padded_part(shard_dim(self.fsdp, held.parameter) or 0, parts) for held in parameters)

    def _axes(self, unit: Unit) -> tuple[str, ...]:
        """Return the mesh axes over which a unit's parameters are sharded."""
        return axes_of_shards(self.view.layout, self.fsdp, unit.held[0].parameter)

    def _parts(self, unit: Unit) -> int:
        """Return the number of shards of a unit's parameters."""
        return self.view.layout.mesh.size(*self._axes(unit))

    def _reduce(self, unit: Unit, step: int, last: bool) -> None:
        reduced = [held for held in unit.held if self.view.has_gradient(held, step)]
        parts = self._parts(unit)
        num_bytes = self._part(reduced, parts) * self.reduced_bytes
        axes = self._axes(unit)
        over_shards, over_replicas = reduce_ops(self.fsdp, self.view.layout, self.reduced, of_experts=unit.is_of_experts)
        if reduced and parts > 1:
            self.ledger.note(step, f"reduce_scatter.{over_shards}", self.view.axes(*axes), num_bytes * parts)
        replicas = [axis for axis in self.view.layout.axes_of(self.fsdp) if axis not in axes]
        if reduced and replicas and (last or not self.fsdp.all_reduce_once or self.fsdp.replica_hook):
            self.ledger.note(step, f"all_reduce.{over_replicas}", self.view.axes(*replicas), num_bytes)


def reduce_op(view: RankView) -> str:
    """Return ``avg`` or ``sum``: the operation that reduces gradients over data-parallel ranks, in the training's precision."""
    return "avg" if averages(ElementType(view.training.precision.value)) and averaging_ranks(view.layout) > 1 else "sum"


def _all_calls(view: RankView, fsdp: FSDP2) -> Totals:
    found = FSDP2Calls(view, fsdp).totals()
    for kind in _kinds(view):
        axes = axes_of_shards(view.layout, fsdp, kind[0].parameter)
        for key, (num_calls, num_bytes) in dtensor_clipping(view, axes, kind, flattened=True).items():
            add(found, key, num_calls, num_bytes)
    return found | (_owners_totals(view, fsdp) if is_distributed_muon(view.training, view.layout) else {})


def _owners_totals(view: RankView, fsdp: FSDP2) -> Totals:
    """Count the calls for distributed Muon: shards to each matrix's owner, and updates back."""
    ledger, axis = Ledger(Stage.UPDATE), view.layout.axes_of(fsdp)[-1]
    parts, index = view.layout.mesh.size(axis), view.index(axis)
    owned = list(enumerate(held for held in view.held if held.trained))
    for step in range(view.training.steps) if parts > 1 else ():
        updated = [(number % parts, held) for number, held in owned if has_kept_gradient(view, held, step)]
        shards = sum(math.prod(shard_shape(held.shape, _cut(fsdp, held), parts, index)) for _, held in updated)
        whole = sum(held.numel for owner, held in updated if owner == index)
        if updated:
            ledger.note(step, "all_to_all", view.axes(axis), (shards + whole) * view.item_bytes, 2)
    return ledger.totals


def _cut(fsdp: FSDP2, held: Held) -> int:
    dim = shard_dim(fsdp, held.parameter)
    assert dim is not None, "a matrix that is trained is cut"
    return dim


def _kinds(view: RankView) -> list[list[Held]]:
    """Group parameters clipped together: by whether they were DTensors before FSDP, or by the axes that shard plain tensors."""
    kinds: dict[tuple[str, ...] | bool, list[Held]] = {}
    for held in view.held:
        kinds.setdefault(_kind(view, held), []).append(held)
    return list(kinds.values())


def _kind(view: RankView, held: Held) -> tuple[str, ...] | bool:
    if has_dtensor_experts(view.layout):
        return is_dtensor_expert(view.layout, held.parameter)
    if view.layout.has(LocalTensorParallel, ExpertParallel):
        return sharding_axes(view, held)
    if any(has_expert_groups(fsdp, view.layout) for fsdp in view.layout.of(FSDP2)):
        return held.parameter.expert_dim is not None
    return any(is_outside(plan, held.parameter) for plan in view.layout.of(TensorParallel))


def _recomputes_units(training: Training, layout: Layout) -> bool:
    of_layers = {parameter.layer for parameter in dtensor_experts(training.model, layout)}
    recomputes = any(layer is not None and layout.execution.checkpoints(layer) for layer in of_layers)
    return recomputes and is_torch_in(FREED_WHILE_RECOMPUTED)


UNITS_GATHERED_AGAIN = Unpredicted(
    reason="fully_shard: gathers of expert units in recomputed layers are not predicted: they depend on which units are freed "
    "at that time",
    applies=_recomputes_units,
)

COUNTS_OF_FULL_BATCH = Unpredicted(
    reason="fully_shard with mesh_dims: reductions of expert counts are not predicted: the counts are partial over ranks, and "
    "any operation on them may ask for one",
    applies=lambda training, layout: (training.model.balances or training.model.has_router_bias) and layout.propagates_placements,
)

HEAD_IN_CHUNKS = Unpredicted(
    reason="fully_shard: gathers and reductions of a head in chunks are not predicted: each chunk may gather and reduce it again",
    applies=lambda training, layout: training.model.head is not None and any(fsdp.loss_chunks > 1 for fsdp in layout.of(FSDP2)),
)

FSDP2_COMMUNICATION = CommunicationModel(
    calls=_all_calls,
    unmodelled=(
        UNITS_GATHERED_AGAIN,
        COUNTS_OF_FULL_BATCH,
        HEAD_IN_CHUNKS,
        replace(
            OPTIMIZER_NOT_ELEMENTWISE,
            applies=lambda training, layout: (
                OPTIMIZER_NOT_ELEMENTWISE.applies(training, layout) and not is_distributed_muon(training, layout)
            ),
        ),
    ),
    uneven=lambda fsdp: fsdp.reshard_to is not None or fsdp.distributed_muon,
)
