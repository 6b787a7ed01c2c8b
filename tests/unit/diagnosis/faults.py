"""Faults in a few lines each, and small scenarios that show them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SPMD,
    Adam,
    Axis,
    Data,
    Layer,
    LayerPlan,
    Layout,
    Loss,
    Mesh,
    Model,
    Parallelism,
    Pipeline,
    Scenario,
    Split,
    TensorParallel,
    Training,
)
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup

Fault = Callable[[Setup], None]

TRAINING = Training(
    model=Model(features=4, layers=(Layer(width=4), Layer(width=2))),
    data=Data(microbatches=(4, 4)),
    optimizer=Adam(lr=0.125),
    steps=2,
)


def spread(parallelism: Parallelism, training: Training = TRAINING, *, axis: str = "dp", ranks: int = 2) -> Scenario:
    """A training over one axis."""
    return Scenario(training=training, layout=Layout(mesh=Mesh(axes=(Axis(name=axis, size=ranks),)), parallelisms=(parallelism,)))


def tensor_parallel(*splits: Split) -> Scenario:
    """The training with its layers split over two ranks."""
    return spread(TensorParallel(plan=tuple(LayerPlan(split=split) for split in splits)), axis="tp")


ON_DDP, ON_FSDP2 = spread(DDP()), spread(FSDP2())
LAYOUTS = (
    ON_DDP,
    spread(DDP(zero_redundancy=True)),
    spread(FSDP1(use_orig_params=False)),
    spread(FSDP1()),
    ON_FSDP2,
    spread(SPMD(), replace(TRAINING, loss=Loss.MSE_SUM)),
    tensor_parallel(Split.COLWISE, Split.ROWWISE),
    spread(Pipeline(), axis="pp"),
)


def gradients(change: Callable[[torch.Tensor], Any]) -> Fault:
    """Change every gradient in place after backward."""

    def apply(setup: Setup) -> None:
        for parameter in setup.model.parameters():
            if parameter.grad is not None:
                change(parameter.grad)

    return lambda setup: setup.before_update.append(lambda _optimizer, _step: apply(setup))


def settings(**values: Any) -> Fault:
    """Change optimizer settings."""

    def apply(optimizer: torch.optim.Optimizer, _schedule: object) -> None:
        for group in optimizer.param_groups:
            group.update(values)

    return lambda setup: setup.before_training.append(apply)


def rows_of_first(setup: Setup) -> None:
    """Let every rank take the first half of the rows."""
    inner = setup.take

    def first(batch: Batch) -> Batch:
        half = [torch.cat([values[: len(values) // 2]] * 2) for values in (batch.inputs, batch.targets)]
        return inner(replace(batch, inputs=half[0], targets=half[1]))

    setup.take = first


def all_rows(setup: Setup) -> None:
    """Let every rank take all rows."""
    setup.take = lambda batch: batch


def keep_gradients(setup: Setup) -> None:
    """Never zero gradients."""
    setup.before_training.append(lambda optimizer, _schedule: vars(optimizer).update(zero_grad=lambda **_: None))


def lose_state(setup: Setup) -> None:
    """Clear the optimizer state at each step."""
    setup.before_step.append(lambda optimizer, _step: optimizer.state.clear())


def nothing_is_updated(setup: Setup) -> None:
    """Skip updates."""
    setup.update = lambda _optimizer: None


def another_start(setup: Setup) -> None:
    """Let rank 1 start from other parameters."""
    if dist.get_rank() == 1:
        with torch.no_grad():
            for parameter in setup.model.parameters():
                parameter.add_(1.0)


def clip_nothing(setup: Setup) -> None:
    """Return the norm without clipping."""

    def clip(_module: nn.Module, parameters: list[torch.Tensor], clipping: Any) -> torch.Tensor:
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], float(clipping.norm_type.value))

    setup.clip_norm = clip


def clip_by_own_shard(setup: Setup) -> None:
    """Clip by the norm over the rank's own shard."""

    def clip(_module: nn.Module, parameters: list[torch.Tensor], clipping: Any) -> torch.Tensor:
        local = [p.grad.to_local() for p in parameters if p.grad is not None]  # type: ignore[attr-defined]
        norm = nn.utils.get_total_norm(local, float(clipping.norm_type.value))
        for gradient in local:
            gradient.mul_(min(1.0, clipping.max_norm / (float(norm) + 1e-6)))
        return norm

    setup.clip_norm = clip


def bias_everywhere(setup: Setup) -> None:
    """Add the second layer's bias on both ranks."""
    linear = setup.model.get_submodule("layers.1.linear")
    linear.register_forward_hook(lambda module, _inputs, outputs: outputs + module.bias.detach().full_tensor())


def round_parameters(setup: Setup) -> None:
    """Keep parameters in bfloat16."""

    def update(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        for parameter in setup.model.parameters():
            parameter.data.copy_(parameter.data.bfloat16())

    setup.update = update


def spoil(setup: Setup) -> None:
    """Replace gradients with values that no fault explains."""
    gradients(lambda gradient: gradient.copy_(torch.cos(1e3 * gradient)))(setup)


def unread(setup: Setup) -> None:
    """Replace gradients with NaN, like results that have not arrived."""
    gradients(lambda gradient: gradient.fill_(torch.nan))(setup)


def skip_a_collective(setup: Setup) -> None:
    """Let rank 1 skip its gradient reduction."""
    assert isinstance(setup.module, DistributedDataParallel)
    if dist.get_rank() == 1:
        module = setup.module
        setup.accumulation = lambda _last: module.no_sync()
