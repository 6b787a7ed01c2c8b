"""`torch.distributed.tensor.parallel.parallelize_module`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from equivcheck.layouts.expected_calls.model import CommunicationModel
from equivcheck.layouts.kind import LayoutKind
from equivcheck.layouts.limits.limit import LayoutLimit, Limit
from equivcheck.parallelisms.tensor_parallel.communication import TENSOR_PARALLEL_COMMUNICATION
from equivcheck.parallelisms.tensor_parallel.limits import LAYOUT_LIMITS, LIMITS, MODEL_LIMITS
from equivcheck.scenario import ActivationSharding, Parallelism, TensorParallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.train.setup import Setup


class TensorParallelKind(LayoutKind):
    """Splits linears by columns or rows, and activations between layers by rows or features."""

    parallelism: ClassVar[type[Parallelism]] = TensorParallel
    model_limits: ClassVar[tuple[Limit, ...]] = MODEL_LIMITS
    limits: ClassVar[tuple[Limit, ...]] = LIMITS
    layout_limits: ClassVar[tuple[LayoutLimit, ...]] = LAYOUT_LIMITS
    communication: ClassVar[CommunicationModel] = TENSOR_PARALLEL_COMMUNICATION

    def apply(self, setup: Setup, parallelism: Parallelism, mesh: DeviceMesh) -> None:
        """Parallelize each layer by its plan, and take of each dropout mask what this rank has of the layer's output."""
        from torch.distributed.tensor.parallel import parallelize_module

        from equivcheck.layouts.distribute import redistribute_gradients
        from equivcheck.parallelisms.tensor_parallel.styles import layer_styles, local_masks

        assert isinstance(parallelism, TensorParallel), parallelism
        sharding = ActivationSharding.WHOLE
        for layer, plan in zip(setup.model.get_submodule("layers").children(), parallelism.plan, strict=True):
            styles = dict(layer_styles(layer, plan, sharding))
            if styles:
                parallelize_module(layer, mesh, styles)
            sharding = plan.output
        if parallelism.redistribute_gradients:
            redistribute_gradients(setup.model.parameters())
        rank, size, inner = mesh.get_local_rank(), mesh.size(), setup.take
        setup.take = lambda batch: local_masks(inner(batch), parallelism.plan, rank, size)
