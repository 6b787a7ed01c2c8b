"""Draws parameters for checking an optimizer: shapes that are awkward to shard, and their placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from equivcheck.system.choice import PrintableEnum

SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "layers.{}.weight": ((4, 4), (6, 4), (5, 3), (3, 7), (8, 2)),
    "layers.{}.bias": ((4,), (5,), (1,)),
    "layers.{}.qkv.weight": ((12, 4), (6, 2)),
    "layers.{}.norm.weight": ((3,), (7,)),
    "layers.{}.gate.weight": ((1, 6), (1, 3)),
    "layers.{}.down.weight": ((6, 1), (2, 5)),
    "layers.{}.experts": ((2, 3, 4), (3, 2, 2)),
}
"""Shapes by name. Some have fewer rows than ranks, so that some ranks have empty shards."""
EDGES: dict[str, tuple[int, ...]] = {"embedding.weight": (7, 4), "head.weight": (7, 4), "scale": ()}
"""Shapes that only some cases contain. `fully_shard` refuses parameters without dims."""


class Placed(PrintableEnum):
    """How ranks hold the parameters."""

    REPLICATED = "replicated"
    """Plain tensors, the same on each rank."""
    FSDP2 = "fsdp2"
    """DTensors, sharded along dim 0 by `fully_shard`."""
    DIM_1 = "dim 1"
    """DTensors, sharded along dim 1 if the parameter has a dim 1."""
    BY_USER = "your parallelize"
    """Distributed by the user's function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCase:
    """One case for checking an optimizer: parameters and gradients, and how ranks hold them."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """Each parameter's name and full shape."""
    placed: Placed
    """How ranks hold the parameters."""
    steps: int
    """How many steps the optimizer makes."""
    seed: int
    """Seed for parameters and gradients."""
    saved_after: int | None = None
    """After how many steps the state is saved and loaded into a new optimizer. None if it is not."""

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in self.shapes)
        again = f", state loaded after step {self.saved_after - 1}" if self.saved_after is not None else ""
        return f"{self.placed.value}: {shapes}{again}"

    def model(self) -> nn.Module:
        """Build a module that holds these parameters. It has no forward."""
        generator = np.random.default_rng(self.seed)
        root = nn.Module()
        for name, shape in self.shapes:
            *path, last = name.split(".")
            owner = root
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(last, nn.Parameter(_drawn(generator, shape)))
        return root

    def gradients(self) -> list[dict[str, torch.Tensor]]:
        """For each step, the full gradients by parameter name."""
        generator = np.random.default_rng((self.seed, 1))
        return [{name: _drawn(generator, shape) for name, shape in self.shapes} for _ in range(self.steps)]


def _drawn(generator: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.asarray(generator.standard_normal(shape)))


def drawn_cases(num: int, placements: Sequence[Placed], steps: int, seed: int) -> list[OptimizerCase]:
    """Draw `num` cases with one to eight parameters each. They use the `placements` in turn.

    Half of the cases save and load a checkpoint.
    """
    generator = np.random.default_rng(seed)
    found = []
    for number in range(num):
        turn, index = divmod(number, len(placements))
        placed, has_edge_without_dims = placements[index], placements[index] in (Placed.REPLICATED, Placed.DIM_1)
        names = generator.choice(list(SHAPES), size=int(generator.integers(1, 6)), replace=True)
        shapes = {name.format(layer): _choice(generator, SHAPES[name]) for layer, name in enumerate(names)}
        shapes |= {name: shape for name, shape in EDGES.items() if generator.random() < 0.3 and (shape or has_edge_without_dims)}
        found.append(
            OptimizerCase(
                shapes=tuple(shapes.items()),
                placed=placed,
                steps=steps,
                seed=seed + number,
                saved_after=steps // 2 if steps > 1 and (turn + index) % 2 else None,
            )
        )
    return found


def _choice(generator: np.random.Generator, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return shapes[int(generator.integers(len(shapes)))]


def smaller_cases(case: OptimizerCase) -> list[OptimizerCase]:
    """Return smaller variants of a case, the smallest first: one parameter, fewer parameters, fewer steps, or no checkpoint."""
    found = [replace(case, shapes=(each,)) for each in case.shapes if len(case.shapes) > 1]
    if len(case.shapes) > 2:
        found += [replace(case, shapes=(*case.shapes[:at], *case.shapes[at + 1 :])) for at in range(len(case.shapes))]
    if case.saved_after is not None:
        found.append(replace(case, saved_after=None))
    if case.steps > 1 and case.saved_after is None:
        found.append(replace(case, steps=1))
    return found


def place_parameters(model: nn.Module, mesh: DeviceMesh, *, placed: Placed) -> None:
    """Distribute a module's parameters over the mesh in place, in the way that `placed` says."""
    if placed is Placed.FSDP2:
        fully_shard(model, mesh=mesh)
    if placed is not Placed.DIM_1:
        return
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = Shard(1 if parameter.dim() > 1 else 0)
            if parameter.dim():
                setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement])))


def take_step(model: nn.Module, gradients: Mapping[str, torch.Tensor], optimizer: Any, _loss: Any) -> None:
    """Set each parameter's gradient, sharded like the parameter, and call the optimizer's step.

    `check_optimizer` trains with this as the training's `step`.
    """
    for name, parameter in model.named_parameters():
        full = gradients[name]
        parameter.grad = full.clone() if not isinstance(parameter, DTensor) else _sharded(full, parameter)
    optimizer.step()


def _sharded(full: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    return distribute_tensor(full, parameter.device_mesh, parameter.placements)
