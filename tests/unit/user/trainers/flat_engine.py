"""A trainer that partitions one flat buffer over ranks, as ZeRO does. Its fields plant mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

from equivcheck import LocalPart


@dataclass(frozen=True, kw_only=True)
class FlatEngine:
    """Adapter and engine in one. Gradients are averaged over ranks and microbatches, and clipped by the norm over all ranks."""

    limit: float | None = None
    """Clipping limit."""
    loss_scale: float = 1.0
    """Factor for the loss, removed before the update."""
    keeps_first: bool = True
    """Whether all microbatches count, and not only the last."""
    divides_twice: bool = False
    """Whether the mean over microbatches is divided by their number once more."""
    averages: bool = True
    """Whether gradients are averaged over ranks, and not summed."""
    shift: int = 0
    """Elements by which the recorded places are wrong."""
    unscales: bool = True
    """Whether the loss scale is removed."""
    unscales_norm: bool = True
    """Whether the reported norm is that of the unscaled gradients."""
    clips_by_own_norm: bool = False
    """Whether each rank clips by the norm of its partition."""
    clips: bool = True
    """Whether gradients are clipped at all."""
    replica_error: float = 0.0
    """Relative error of the parameters on rank 1."""
    gathers: bool = True
    """Whether the other ranks get the updated parameters."""
    reads_early: bool = False
    """Whether the adapter reads gradients before they are reduced."""
    gradients_are: Literal["unclipped", "clipped"] = "unclipped"

    def reference_step(self) -> Any:
        """The same step on one device."""

        def step(model: nn.Module, microbatches: Sequence[Any], optimizer: Any, loss: Any) -> dict[str, Any]:
            optimizer.zero_grad()
            total = 0.0
            for inputs, targets in microbatches:
                value = loss(model(inputs), targets) / len(microbatches)
                value.backward()
                total += float(value.detach())
            norm = clip_grad_norm_(model.parameters(), float("inf") if self.limit is None else self.limit)
            optimizer.step()
            return {"loss": total, "norm": norm}

        return step

    def train(
        self, model: nn.Module, _mesh: Any, batches: Any, loss: Any, make_optimizer: Callable[[list[Any]], Any], record: Any
    ) -> None:
        """Train on this rank."""
        named = [*model.named_parameters()]
        flat = nn.utils.parameters_to_vector([parameter for _, parameter in named]).detach()
        size, rank = dist.get_world_size(), dist.get_rank()
        own = slice(len(flat) * rank // size, len(flat) * (rank + 1) // size)
        partition = nn.Parameter(flat[own].clone())
        optimizer = make_optimizer([partition])
        for microbatches in batches:
            gradient, total = torch.zeros_like(flat), 0.0
            for inputs, targets in microbatches:
                model.zero_grad()
                value = loss(model(inputs), targets) / len(microbatches)
                (value * self.loss_scale / (len(microbatches) if self.divides_twice else 1)).backward()
                found = torch.cat([parameter.grad.reshape(-1) for _, parameter in named])
                gradient = gradient + found if self.keeps_first else found
                total += float(value.detach())
            if self.reads_early:
                record.before_update([*self.parts(named, gradient[own], own)], scale=self.loss_scale)
            dist.all_reduce(gradient)
            gradient /= size if self.averages else 1
            partition.grad = gradient[own].clone()
            if not self.reads_early:
                record.before_update([*self.parts(named, partition.grad, own)], scale=self.loss_scale)
            if self.unscales:
                partition.grad /= self.loss_scale
            norm = (partition.grad if self.clips_by_own_norm else gradient / (self.loss_scale if self.unscales else 1)).norm()
            if self.limit is not None and self.clips:
                partition.grad *= torch.clamp(self.limit / (norm + 1e-6), max=1.0)
            optimizer.step()
            flat[own] = partition.detach()
            if self.gathers:
                others = torch.zeros_like(flat)
                others[own] = flat[own]
                dist.all_reduce(others)
                flat = others
            nn.utils.vector_to_parameters(flat, [parameter for _, parameter in named])
            reported = float(norm) if self.unscales_norm else float(norm) * self.loss_scale
            factor = 1.0 + self.replica_error * rank
            full = [LocalPart(name=name, shape=tuple(each.shape), tensor=each * factor) for name, each in named]
            record.after_update(total, full, norm=reported)
        state = optimizer.state[partition]
        kept = {key: value for key, value in state.items() if value.shape == partition.shape}
        parts = [part for key, value in kept.items() for part in self.parts(named, value, own, f"/{key}")]
        parts += [LocalPart(name=f"{name}/step", shape=(), tensor=state["step"]) for name, _ in named]
        record.at_end(parts)

    def parts(
        self, named: Sequence[tuple[str, nn.Parameter]], tensor: torch.Tensor, own: slice, suffix: str = ""
    ) -> Iterator[LocalPart]:
        """Runs of parameters in a partition of the flat buffer."""
        start = 0
        for name, parameter in named:
            first, last = max(start, own.start), min(start + parameter.numel(), own.stop)
            if first < last:
                offset = min(first - start + self.shift, parameter.numel() - (last - first))
                yield LocalPart(
                    name=name + suffix,
                    shape=tuple(parameter.shape),
                    tensor=tensor[first - own.start : last - own.start],
                    offset=offset,
                )
            start += parameter.numel()
