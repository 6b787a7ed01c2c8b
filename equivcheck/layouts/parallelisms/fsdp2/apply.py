"""Applies `torch.distributed.fsdp.fully_shard` to a rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from equivcheck.layouts.base.dtensor_experts import expert_modules, has_dtensor_experts
from equivcheck.layouts.base.kind import LayoutKind
from equivcheck.layouts.base.rounding import FULLY_SHARD_WITHOUT_GRAD_DTYPE, Rounding, WhenReduced, reduced_in
from equivcheck.layouts.parallelisms.fsdp2.communication import FSDP2_COMMUNICATION
from equivcheck.layouts.parallelisms.fsdp2.division import (
    averaging_ranks,
    division_of,
    expert_divide_factor,
    hooks_replicas,
)
from equivcheck.layouts.parallelisms.fsdp2.limits import LAYOUT_LIMITS, LIMITS
from equivcheck.layouts.parallelisms.fsdp2.meshes import UnitMeshes, meshes_of
from equivcheck.scenario import FSDP2, Distribution, Layout, MeshDims, Muon, Precision, Training, Wrapping
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD
from equivcheck.system.torch_version import is_torch_in
from equivcheck.training.layers.parameters import is_norm_parameter

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule, MixedPrecisionPolicy

    from equivcheck.layouts.base.script.draft import Draft
    from equivcheck.training.setup import Setup


class FSDP2Kind(LayoutKind[FSDP2]):
    """Applies `fully_shard` to the model, or to each layer and then the model. On two axes it is HSDP."""

    parallelism = FSDP2
    limits = LIMITS
    layout_limits = LAYOUT_LIMITS
    communication = FSDP2_COMMUNICATION

    def apply(self, setup: Setup, parallelism: FSDP2, mesh: DeviceMesh) -> None:
        """Apply `fully_shard` to the model or to each pipeline stage, and set the options of all units."""
        from torch import distributed as dist

        from equivcheck.layouts.base.data_rows import take_rows
        from equivcheck.layouts.base.distribute import distribute_batch, distribute_parameters
        from equivcheck.layouts.parallelisms.fsdp2.chunked_loss import compute_in_chunks
        from equivcheck.worlds.meshes import new_groups

        parts = list(setup.parts)
        assert setup.layout is not None, "a layout is applied"
        meshes = meshes_of(setup, parallelism, mesh)
        if parallelism.mesh_dims is not None:
            distribute_parameters(setup.model, mesh, Distribution.REPLICATE)
        # Torch creates a group for each unit that is resharded to fewer ranks, and one for separate reductions.
        with new_groups() as groups:
            for part in parts:
                _shard_part(part, parallelism, setup.layout, mesh, meshes)

        def release() -> None:
            for group in groups:
                dist.destroy_process_group(group)

        setup.release = release
        if parallelism.mesh_dims is None:
            setup.loss_scale *= mesh.size()
            num_ranks = averaging_ranks(setup.layout)
            setup.gradient_scale = (parallelism.gradient_divide_factor or num_ranks) / num_ranks
        else:
            setup.take = lambda batch: distribute_batch(batch, mesh)
        setup.accumulation = lambda last: _start_microbatch(parts, parallelism, last)
        if parallelism.distributed_muon:
            _deal_out_matrices(setup, mesh)
        if parallelism.loss_chunks > 1 and setup.training.model.head is not None:
            compute_in_chunks(setup, parallelism.loss_chunks)
        take_rows(setup, mesh, propagates=parallelism.mesh_dims is not None)

    def when_reduced(self, parallelism: FSDP2, layout: Layout) -> WhenReduced:  # noqa: ARG002 - of the base class
        """Return when gradients are reduced: with `no_sync` only after the last microbatch, otherwise after each one.

        The result also says that ranks keep no full gradients, but only shards.
        """
        return WhenReduced(once=parallelism.no_sync, whole=False)

    def rounding(self, parallelism: FSDP2, layout: Layout, precision: Precision) -> Rounding | None:
        """Return how `mixed_precision` rounds activations and gradients. None without mixed precision."""
        policy = parallelism.mixed_precision
        if policy is None:
            return None
        reduce = reduced_in(precision, parallelism)
        return Rounding(
            replicas=layout.mesh.size(REPLICATE),
            shards=layout.mesh.size(DP, SHARD),
            compute=policy.param,
            keeps_norms=parallelism.full_precision_norms,
            output=policy.output,
            reduce=reduce,
            division=division_of(parallelism, layout, reduce),
            divisor=parallelism.gradient_divide_factor,
            when=self.when_reduced(parallelism, layout),
            accumulates_reduced=True,
            grad_dtype=not is_torch_in(FULLY_SHARD_WITHOUT_GRAD_DTYPE),
            replicas_once=parallelism.all_reduce_once and REPLICATE in layout.mesh.names,
        )

    def write_script(self, draft: Draft, parallelism: FSDP2) -> None:
        """Let the exported script call `fully_shard` on its model."""
        from equivcheck.layouts.parallelisms.fsdp2.export import write

        write(draft, parallelism)

    def import_known(self) -> None:
        """Register the predicates for known issues with FSDP2."""
        import equivcheck.layouts.parallelisms.fsdp2.known  # noqa: F401


def _shard_part(part: nn.Module, fsdp: FSDP2, layout: Layout, mesh: DeviceMesh, meshes: UnitMeshes) -> None:
    """Shard the model or a pipeline stage, and set its units' options."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    experts = expert_modules(part) if has_dtensor_experts(layout) else []
    options = _options(part, fsdp, mesh, meshes.all_ranks)
    for unit in experts:
        fully_shard(unit, mesh=meshes.experts, **options, mp_policy=_policy(fsdp, part, is_root=False))
    _shard(part, fsdp, {"mesh": meshes.others} | options)
    assert isinstance(part, FSDPModule), "fully_shard changes the class of a part"
    if fsdp.separate_reduce_group:
        part.set_separate_reduce_scatter_group(True)
    for module in _fsdp_modules(part):
        if fsdp.gradient_divide_factor is not None:
            module.set_gradient_divide_factor(fsdp.gradient_divide_factor)
        if fsdp.sum_reductions:
            module.set_force_sum_reduction_for_comms(True)
    for unit in experts:
        assert isinstance(unit, FSDPModule), "fully_shard changes the class of a unit"
        unit.set_gradient_divide_factor(expert_divide_factor(fsdp, layout))
    if hooks_replicas(fsdp, layout):
        _reduce_by_hook(part, experts, fsdp, mesh.get_group(0))


def _options(model: nn.Module, fsdp: FSDP2, mesh: DeviceMesh, all_ranks: DeviceMesh | None) -> dict[str, Any]:
    """Return the arguments for `fully_shard` that all units share."""
    from torch.distributed.fsdp import CPUOffloadPolicy
    from torch.distributed.tensor import Shard

    options: dict[str, Any] = {"reshard_after_forward": fsdp.reshard_to or fsdp.reshard_after_forward}
    if fsdp.shard_last_dim:
        options["shard_placement_fn"] = lambda parameter: Shard(parameter.ndim - 1)
    if fsdp.shard_largest_dim:
        options["shard_placement_fn"] = lambda parameter: Shard(parameter.shape.index(max(parameter.shape)))
    if all_ranks is not None:
        # torch before 2.12 lacks names that this module imports.
        from equivcheck.layouts.parallelisms.fsdp2.expert_mesh import experts_over

        own = {parameter for module in expert_modules(model) for parameter in module.parameters()}
        options["shard_placement_fn"] = experts_over(all_ranks, own, options.get("shard_placement_fn"))
    if fsdp.ignore_frozen:
        options["ignored_params"] = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    if fsdp.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if fsdp.mesh_dims is not None:
        options["dp_mesh_dims"] = _mesh_dims(fsdp.mesh_dims, mesh)
    return options


def _shard(model: nn.Module, fsdp: FSDP2, options: dict[str, Any]) -> None:
    """Call `fully_shard` for layer units and the root unit, which gets all other parameters."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    from equivcheck.training.layers.module import LayerModule

    units: list[Any] = []
    if fsdp.wrapping is not Wrapping.ROOT_ONLY:
        layers = [module for module in model.modules() if isinstance(module, LayerModule)]
        units = [layers[at : at + fsdp.layers_per_unit] for at in range(0, len(layers), fsdp.layers_per_unit)]
    for unit in (*units, *_token_units(model, fsdp)):
        fully_shard(unit, **options, mp_policy=_policy(fsdp, model, is_root=False))
    fully_shard(model, **options, mp_policy=_policy(fsdp, model, is_root=True))
    if fsdp.embedding_unit and isinstance(model.embedding, FSDPModule):
        model.embedding.set_unshard_in_backward(False)
    if fsdp.explicit_prefetch:
        for (first, *_), (following, *_) in pairwise(units):
            first.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([first])


def _mesh_dims(mesh_dims: MeshDims, mesh: DeviceMesh) -> DataParallelMeshDims:
    """Name the axes that shard and the axes that replicate."""
    from torch.distributed.fsdp import DataParallelMeshDims

    names = mesh.mesh_dim_names
    assert names is not None, "meshes of layouts have names"
    if mesh_dims is MeshDims.REPLICATE:
        return DataParallelMeshDims(replicate=names if len(names) > 1 else names[0])
    return DataParallelMeshDims(shard=names[-1], replicate=names[0] if len(names) > 1 else None)


def _token_units(model: Any, fsdp: FSDP2) -> list[list[nn.Module]]:
    """Return units outside the layers. A pipeline stage may have no embedding or no head."""
    units: list[list[nn.Module]] = []
    if fsdp.embedding_unit and model.embedding is not None:
        units.append([model.embedding])
    if fsdp.head_unit and model.head is not None:
        units.append([module for module in (model.head.norm, model.head.linear) if module is not None])
    return units


def _reduce_by_hook(model: nn.Module, experts: Sequence[nn.Module], fsdp: FSDP2, group: ProcessGroup) -> None:
    """Average each unit's gradients over replicas by a hook. A divide factor already counts all ranks."""
    from torch import distributed as dist
    from torch import nn

    def all_reduce(reduced: torch.Tensor, *, divisor: int) -> None:
        dist.all_reduce(reduced, group=group)
        reduced.div_(divisor)

    divisor = group.size() if fsdp.gradient_divide_factor is None else 1
    for unit in _fsdp_modules(model):
        unit.set_all_reduce_hook(partial(all_reduce, divisor=divisor))
    for unit in _fsdp_modules(nn.ModuleList(experts)):
        unit.set_all_reduce_hook(partial(all_reduce, divisor=1))


def _deal_out_matrices(setup: Setup, mesh: DeviceMesh) -> None:
    """Distributed Muon: assign each matrix to a rank in turn, which orthogonalizes the full matrix."""
    from equivcheck.layouts.parallelisms.fsdp2.distributed_muon import DistributedMuon
    from equivcheck.training.update.optimizer import optimizer_parts

    if not isinstance(setup.training.optimizer, Muon):
        return
    group = mesh.get_group(mesh.ndim - 1)

    def build(training: Training, parameters: Iterable[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        named = list(parameters)
        parts = optimizer_parts(training, named)
        trained = [parameter for _, parameter in named if parameter.requires_grad]
        owners = {parameter: number % group.size() for number, parameter in enumerate(trained)}
        return DistributedMuon(parts.groups, group, owners, **parts.arguments)

    setup.build_optimizer = build


def _fsdp_modules(model: Any) -> list[FSDPModule]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _start_microbatch(parts: Iterable[Any], fsdp: FSDP2, last: bool) -> AbstractContextManager[object]:
    """Set what this microbatch's backward reduces and reshards. A pipeline's schedule replaces the first and the third."""
    for part in parts:
        if fsdp.no_sync:
            part.set_requires_gradient_sync(last)
        if fsdp.all_reduce_once:
            part.set_requires_all_reduce(last)
        if not fsdp.reshard_after_backward:
            part.set_reshard_after_backward(last)
        for unit in _fsdp_modules(part) if fsdp.explicit_unshard else ():
            unit.unshard(async_op=True)  # pre-forward waits for it
    return nullcontext()


def _policy(fsdp: FSDP2, model: nn.Module, *, is_root: bool) -> MixedPrecisionPolicy:
    """Return a unit's mixed-precision policy. Only the root casts outputs."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = fsdp.mixed_precision
    if policy is None:
        return MixedPrecisionPolicy()
    kinds = (policy.param, policy.reduce, policy.output if is_root else None)
    param, reduce, output = (None if kind is None else getattr(torch, kind.value) for kind in kinds)
    options: dict[str, Any] = {"param_dtype": param, "reduce_dtype": reduce, "output_dtype": output}
    if fsdp.full_precision_norms:
        norms = {parameter for name, parameter in model.named_parameters() if is_norm_parameter(name)}
        options["param_dtype_override_fn"] = lambda parameter: parameter.dtype if parameter in norms else None
    return MixedPrecisionPolicy(**options)
