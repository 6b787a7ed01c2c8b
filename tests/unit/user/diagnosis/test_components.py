"""Fused weights whose components are split wrongly, or read from wrong places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from equivcheck import check_training
from equivcheck.oracle.verdict.cause import Cause
from unit.user.programs import Total, brought


class Layer(nn.Module):
    """A fused linear layer whose components are multiplied; `sizes` are those of this rank."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.fused, self.sizes = nn.Linear(4, sum(sizes)), sizes
        self.group: dist.ProcessGroup | None = None
        self.out = nn.Linear(sizes[0], 4, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Add to the inputs."""
        inputs = inputs.detach()
        first, *others = self.fused(inputs).split(self.sizes, -1)
        for other in others:
            first = first * other.tanh().repeat_interleave(first.shape[-1] // other.shape[-1], -1)
        out = self.out(first)
        return inputs + (out if self.group is None else Total.apply(out, self.group))


def model(*sizes: tuple[int, ...]) -> Callable[[], nn.Module]:
    """One layer for each tuple of component sizes; each sees the others' outputs without gradients."""
    return lambda: nn.ModuleDict({"layers": nn.ModuleList(map(Layer, sizes))})


def step(model: Any, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
    """A step that calls the layers one after the other."""
    optimizer.zero_grad()
    hidden, total = batch[0], torch.zeros(())
    for layer in model["layers"]:
        hidden = layer(hidden)
        total = total + loss(hidden[..., :2], batch[1])
    total.backward()
    optimizer.step()
    return total.detach()


def split(*, by_component: bool) -> Callable[..., None]:
    """Split each layer over two ranks."""

    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        for layer in model["layers"]:
            for name in ("weight", "bias"):
                full = getattr(layer.fused, name).detach()
                parts = full.split(layer.sizes) if by_component else [full]
                mine = torch.cat([part.chunk(2)[mesh.get_local_rank()] for part in parts])
                setattr(layer.fused, name, nn.Parameter(mine.clone()))
            layer.out.weight = nn.Parameter(layer.out.weight.detach().chunk(2, 1)[mesh.get_local_rank()].clone())
            layer.sizes, layer.group = tuple(size // 2 for size in layer.sizes), mesh.get_group()

    return parallelize


def check(*sizes: tuple[int, ...], by_component: bool, components: Any = None) -> Any:
    """Check layers with components of these sizes; `components` is the third entry in `cuts`."""
    entry = (0, "tp") if components is None else (0, "tp", components)
    cuts = {"layers.*.fused.*": (entry,), "layers.*.out.weight": ((1, "tp"),)}
    return check_training(
        **brought(model=model(*sizes), parallelize=split(by_component=by_component), mesh={"tp": 2}, cuts=cuts, step=step)
    )


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([(4, 4)], "{0} as 2 components"),
        ([(4, 4, 4), (4, 4, 4)], "`layers.0.fused.weight`, `layers.0.fused.bias` and 2 more as 3 components"),
        ([(8, 4, 4)], "{0} as 3 components in the ratio 2:1:1"),
        ([(4, 4, 4), (4, 4)], "{0} as 3 components and {1} as 2 components"),
    ],
)
def test_a_weight_split_as_one_block_is_named(sizes: list[tuple[int, ...]], words: str) -> None:
    """The ranks read components that are others' rows."""
    verdict = check(*sizes, by_component=False)
    read = words.format(*(f"`layers.{number}.fused.weight` and `layers.{number}.fused.bias`" for number in range(2)))
    cause = f"your model reads {read}, but the 2 tp ranks split them as one block: split each component by itself"
    assert (verdict.cause, verdict.kinds) == (cause, (Cause.PERMUTED,))


def test_a_block_is_seen_under_fsdp() -> None:
    """FSDP2 splits each tensor-parallel shard again."""

    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        split(by_component=False)(model, mesh["tp"])
        for layer in model["layers"]:
            fully_shard(layer, mesh=mesh["dp"])

    cuts = {"layers.*.fused.*": ((0, "tp"),), "layers.*.out.weight": ((1, "tp"),)}
    mesh = {"dp": 2, "tp": 2}
    verdict = check_training(**brought(model=model((4, 4)), parallelize=parallelize, mesh=mesh, cuts=cuts, step=step))
    assert "`layers.0.fused.bias` as 2 components, but the 2 tp ranks split them as one block" in verdict.cause


@pytest.mark.parametrize(("sizes", "components"), [((4, 4, 4), 3), ((8, 4, 4), (8, 4, 4))])
def test_cuts_without_components_are_named(sizes: tuple[int, ...], components: Any) -> None:
    """Correct ranks are read from wrong places. With the recommended `cuts` they agree."""
    verdict = check(sizes, by_component=True)
    assert verdict.kinds == (Cause.PERMUTED,)
    assert verdict.cause == (
        "your ranks split each component of `layers.0.fused.weight` and `layers.0.fused.bias`, but `cuts` describes one block: "
        f"pass cuts={{'layers.0.fused.weight': ((0, 'tp', {components}),)}}, and the same for the others"
    )
    check(sizes, by_component=True, components=components).assert_equivalent()


@pytest.mark.parametrize(("sizes", "components"), [((4, 4), 2), ((8, 4, 4), (8, 4, 4))])
def test_a_block_that_cuts_describes_as_components_is_named(sizes: tuple[int, ...], components: Any) -> None:
    """The user's `cuts` are right, and the ranks are not."""
    verdict = check(sizes, by_component=False, components=components)
    assert verdict.kinds == (Cause.PERMUTED,)
    assert verdict.cause == (
        "the 2 tp ranks split `layers.0.fused.weight` and `layers.0.fused.bias` as one block, but `cuts` describes components: "
        "split each component by itself"
    )


class _Concatenate(torch.autograd.Function):
    """All ranks' rows, one rank after the other; in backward, this rank's rows."""

    @staticmethod
    def forward(_context: Any, part: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(parts, part)
        return torch.cat(parts)

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.chunk(2)[dist.get_rank()].clone()


def test_parts_of_components_are_not_called_a_block() -> None:
    """Ranks split each component correctly, and gather the parts in a wrong order: the same values, but another mistake."""

    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        (layer,) = model["layers"]
        for name in ("weight", "bias"):
            parts = getattr(layer.fused, name).detach().split(layer.sizes)
            setattr(layer.fused, name, nn.Parameter(torch.cat([part.chunk(2)[mesh.get_local_rank()] for part in parts])))
        layer.fused.forward = lambda inputs: nn.functional.linear(
            inputs, _Concatenate.apply(layer.fused.weight), _Concatenate.apply(layer.fused.bias)
        )

    cuts = {"layers.*.fused.*": ((0, "tp", 2),)}
    verdict = check_training(**brought(model=model((4, 4)), parallelize=parallelize, mesh={"tp": 2}, cuts=cuts, step=step))
    assert verdict.divergence is not None
    assert not verdict.cause


def test_another_mistake_in_a_split_layer_is_not_taken_for_a_wrong_split() -> None:
    """One bias that all ranks add is no matter of components."""

    def biased(model: Any, mesh: DeviceMesh) -> None:
        split(by_component=True)(model, mesh)
        model["layers"][0].fused.register_forward_hook(lambda _module, _inputs, output: output + 1)

    cuts = {"layers.*.fused.*": ((0, "tp", 2),), "layers.*.out.weight": ((1, "tp"),)}
    verdict = check_training(**brought(model=model((4, 4)), parallelize=biased, mesh={"tp": 2}, cuts=cuts, step=step))
    assert verdict.divergence is not None
    assert Cause.PERMUTED not in verdict.kinds
