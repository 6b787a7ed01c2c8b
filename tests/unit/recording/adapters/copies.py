"""Handwritten optimizers that update copies of parameters in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from equivcheck.recording.watch.record import record

STEPS = 3
Kind = Callable[[Sequence[nn.Parameter]], list[torch.Tensor]]
"""Makes an optimizer's copies of parameters."""


def one_by_one(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """A copy of each."""
    return [nn.Parameter(parameter.detach().clone().float()) for parameter in parameters]


def attributes(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """As Megatron does it; the optimizer has them in another order."""
    copies = one_by_one(parameters)
    for parameter, copy in zip(parameters, copies, strict=True):
        parameter.main_param = copy  # type: ignore[attr-defined]
    return copies


def flat(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """One copy of all."""
    return [nn.Parameter(torch.cat([parameter.detach().reshape(-1) for parameter in parameters]).float())]


KINDS: dict[str, Kind] = {"one by one": one_by_one, "attributes": attributes, "flat": flat}


class MixedPrecision:
    """Updates copies in float32, and rounds them to the parameters afterwards."""

    def __init__(self, parameters: Sequence[nn.Parameter], kind: str, lr: float) -> None:
        self.parameters, self.copies = parameters, KINDS[kind](parameters)
        order = reversed(self.copies) if kind == "attributes" else self.copies
        self.optimizer = torch.optim.AdamW(order, lr=lr)

    def step(self, fault: str) -> None:
        gradients = [parameter.grad for parameter in self.parameters]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients if gradient is not None]).float()
        for copy, gradient in zip(self.copies, flat.split([copy.numel() for copy in self.copies]), strict=True):
            copy.grad = gradient.view_as(copy).clone()
        if fault == "gradient":
            assert self.copies[0].grad is not None
            self.copies[0].grad.view(-1)[0] += 10.0
        if fault == "copy":
            self.copies[0].data.view(-1)[:8] += 0.4
        self.optimizer.step()
        updated = torch.cat([copy.detach().reshape(-1) for copy in self.copies])
        for parameter, values in zip(self.parameters, updated.split([each.numel() for each in self.parameters]), strict=True):
            if fault != "not rounded":
                parameter.data.copy_(values.view_as(parameter))


class Sharded:
    """Each rank updates its equal part of a flat copy, as DeepSpeed's ZeRO does; the parameters share a flat storage."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float) -> None:
        self.parameters = parameters
        count = -(-sum(each.numel() for each in parameters) // dist.get_world_size())
        self.flat = torch.zeros(count * dist.get_world_size(), dtype=parameters[0].dtype)
        place = 0
        for parameter in parameters:
            self.flat[place : place + parameter.numel()] = parameter.detach().reshape(-1)
            parameter.data = self.flat[place : place + parameter.numel()].view_as(parameter)
            place += parameter.numel()
        self.own = self.flat[dist.get_rank() * count :][:count]
        self.copy = nn.Parameter(self.own.float())
        self.optimizer = torch.optim.AdamW([self.copy], lr=lr)

    def step(self, fault: str) -> None:
        flat = torch.zeros(self.flat.shape)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        flat[: sum(each.numel() for each in gradients)] = torch.cat([gradient.reshape(-1) for gradient in gradients]).float()
        dist.all_reduce(flat)
        start = self.own.storage_offset()
        self.copy.grad = flat[start : start + self.copy.numel()] / (1 if fault == "sum" else dist.get_world_size())
        self.optimizer.step()
        self.own.copy_(self.copy.detach())
        updated = [torch.empty_like(self.own) for _ in range(dist.get_world_size())]
        dist.all_gather(updated, self.own.clone())
        self.flat.copy_(torch.cat(updated))


class Slices:
    """Each rank updates consecutive elements of each parameter, as Megatron's distributed optimizer does."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float) -> None:
        self.parameters = parameters
        for parameter in parameters:
            own = parameter.detach().reshape(-1).tensor_split(dist.get_world_size())[dist.get_rank()]
            parameter.main_param = nn.Parameter(own.float())  # type: ignore[attr-defined]
        copies = [parameter.main_param for parameter in parameters]  # type: ignore[attr-defined]
        self.optimizer = torch.optim.AdamW(copies, lr=lr)

    def step(self, fault: str) -> None:
        num_ranks, rank = dist.get_world_size(), dist.get_rank()
        for parameter in self.parameters:
            assert parameter.grad is not None
            gradient = parameter.grad.float().reshape(-1)
            dist.all_reduce(gradient)
            parameter.main_param.grad = gradient.tensor_split(num_ranks)[rank] / (1 if fault == "sum" else num_ranks)  # type: ignore[attr-defined]
        self.optimizer.step()
        for parameter in self.parameters:
            pieces = [torch.empty_like(part) for part in parameter.detach().reshape(-1).tensor_split(num_ranks)]
            dist.all_gather(pieces, parameter.main_param.detach().to(parameter.dtype))  # type: ignore[attr-defined]
            parameter.data.copy_(torch.cat(pieces).view_as(parameter))


def train(  # noqa: PLR0913 - options
    folder: Path, kind: str = "", fault: str = "", start: str = "", *, dtype: torch.dtype = torch.bfloat16, moved: int = 0
) -> Path:
    """Two norms that start with the same values, between linears. Without a kind, the optimizer has the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.Linear(24, 24), nn.LayerNorm(24), nn.Linear(24, 2))
    model.to(torch.bfloat16).to(dtype)  # all dtypes start with the same numbers
    own, lr = list(model.parameters()), 0.2 if fault == "rate" else 0.05
    if start == "ramps":  # parts of constants are in several places
        for parameter in own:
            parameter.data += torch.linspace(0.0, 1.0, parameter.numel()).view_as(parameter).to(dtype)
    optimizers = {"": torch.optim.AdamW, "sharded": Sharded, "slices": Slices}
    optimizer = MixedPrecision(own, kind, lr) if kind in KINDS else optimizers[kind](own, lr=lr)
    num_ranks, rank = (dist.get_world_size(), dist.get_rank()) if kind in {"sharded", "slices"} else (1, 0)
    with record(folder, moved=moved):
        for step in range(STEPS):
            model.zero_grad()
            inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
            model(inputs[rank::num_ranks]).square().mean().backward()
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.step()
            else:
                optimizer.step(fault if step == 1 else "")
    return folder


def train_on_rank(folder: Path, *arguments: str) -> None:
    """Entry point on ranks."""
    train(folder, *arguments)
