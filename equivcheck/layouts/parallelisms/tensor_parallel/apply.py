"""Applies `torch.distributed.tensor.parallel.parallelize_module` to a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from equivcheck.layouts.base.kind import LayoutKind
from equivcheck.layouts.base.plan.rules import inputs_of
from equivcheck.layouts.parallelisms.tensor_parallel.communication import TENSOR_PARALLEL_COMMUNICATION
from equivcheck.layouts.parallelisms.tensor_parallel.limits import LAYOUT_LIMITS, LIMITS
from equivcheck.scenario import Split, TensorParallel, Training

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel.style import ParallelStyle

    from equivcheck.layouts.base.script.draft import Draft
    from equivcheck.training.setup import Setup


class TensorParallelKind(LayoutKind[TensorParallel]):
    """Applies `parallelize_module`. Its plan shards the embedding, the layers, the head, and the activations between them."""

    parallelism = TensorParallel
    limits = LIMITS
    layout_limits = LAYOUT_LIMITS
    communication = TENSOR_PARALLEL_COMMUNICATION

    def apply(self, setup: Setup, parallelism: TensorParallel, mesh: DeviceMesh) -> None:
        """Parallelize each module by the plan, and shard dropout masks."""
        from torch.distributed.tensor.parallel import parallelize_module

        from equivcheck.layouts.base.data_rows import local_masks, with_equal_chunks
        from equivcheck.layouts.base.distribute import redistribute_gradients
        from equivcheck.layouts.parallelisms.tensor_parallel.styles import (
            head_styles,
            layer_styles,
            placement,
            source_styles,
            tie_head_again,
        )
        from equivcheck.training.material import Batch

        model = setup.training.model
        styles: dict[str, ParallelStyle] = {}
        if model.source is not None and parallelism.source is not Split.NOT_IN_PLAN:
            styles |= source_styles(model, parallelism)
        inputs = inputs_of(model, parallelism)
        setup.activation_mesh, setup.activation_placements = mesh, tuple(placement(model, each) for each in inputs)
        for index, (layer, plan) in enumerate(zip(model.layers, parallelism.plan, strict=True)):
            styles |= {f"layers.{index}.{name}": style for name, style in layer_styles(model, layer, plan, inputs[index])}
        if model.head is not None and parallelism.head is not Split.NOT_IN_PLAN:
            styles |= head_styles(model, parallelism)
        if styles:
            parallelize_module(setup.model, mesh, styles)
        if model.head is not None and model.head.tied:
            tie_head_again(setup.model)
        if parallelism.redistribute_gradients:
            redistribute_gradients(setup.model.parameters())
        if parallelism.loss_parallel:
            _shard_logits(setup)
        rank, size, inner = mesh.get_local_rank(), mesh.size(), setup.take

        def take(batch: Batch) -> Batch:
            taken = with_equal_chunks(inner(batch), setup.num_chunks)
            return local_masks(taken, parallelism.plan, rank, size, setup.num_chunks)

        setup.take = take

    def write_script(self, draft: Draft, parallelism: TensorParallel) -> None:
        """Let the exported script call `parallelize_module` on its model."""
        from equivcheck.layouts.parallelisms.tensor_parallel.export import write

        write(draft, parallelism)

    def import_known(self) -> None:
        """Register the predicates for known issues with tensor parallelism."""
        import equivcheck.layouts.parallelisms.tensor_parallel.known  # noqa: F401


def _shard_logits(setup: Setup) -> None:
    """Compute loss and backward under `loss_parallel`. Logits are DTensors; every rank has all labels."""
    from torch.distributed.tensor.parallel import loss_parallel

    from equivcheck.training.layers.module import replicated_like

    inner = setup.loss

    def loss(training: Training, logits: torch.Tensor, labels: torch.Tensor, divisor: float = 1.0) -> torch.Tensor:
        return inner(training, logits, replicated_like(logits, labels), divisor)

    @contextmanager
    def compute_context() -> Iterator[None]:
        # loss_parallel removes its handlers only if it is left without an error.
        entered = loss_parallel()
        entered.__enter__()
        try:
            yield
        finally:
            entered.__exit__(None, None, None)

    setup.loss, setup.compute_context = loss, compute_context
