"""A small training with planted faults, on one device and on ranks that reduce gradients themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from equivcheck.recording.watch.record import record

STEPS = 3
ROWS = 16
MOST = 0.1
"""Limit for clipped gradients."""
LAYOUTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "one": lambda model: model,
    "ranks": lambda model: model,
    "ddp": DistributedDataParallel,
    "fsdp1": lambda model: FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu")),
    "fsdp2": fully_shard,
}
"""Models by layout. ``ranks`` average gradients without a wrapper."""


class Model(nn.Module):
    """Embedding, query and key, norm and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.query, self.key = nn.Linear(8, 40), nn.Linear(8, 40)
        self.norm, self.down = nn.LayerNorm(40), nn.Linear(40, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores with shape (rows, 3), for tokens with shape (rows, 4)."""
        hidden = self.embedding(tokens).mean(1)
        scores: torch.Tensor = self.down(self.norm(torch.tanh(self.query(hidden)) * torch.sigmoid(self.key(hidden))))
        return scores


class Run:
    """One training. A fault replaces some of its methods, such as `reduce`, or attributes, such as `rate`."""

    rate, decay, momentum, betas = 0.05, 0.0, 0.0, (0.9, 0.999)
    num_parts = 2
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.SGD
    most = MOST

    def __init__(self, layout: str, base: str, fault: str, size: int, rank: int) -> None:
        self.layout, self.size, self.rank, self.step = layout, size, rank, 0
        for name, value in (BASES[base] | FAULTS[fault]).items():
            setattr(self, name, MethodType(value, self) if isinstance(value, FunctionType) else value)
        torch.manual_seed(0)
        self.model = Model()
        self.build()
        self.module = LAYOUTS[layout](self.model)
        self.optimizer = self.build_optimizer()

    def build(self) -> None:
        """Change initial parameters."""

    def build_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, with one parameter group."""
        options = {"lr": self.rate, "weight_decay": self.decay}
        options |= {"momentum": self.momentum} if self.optimizer_class is torch.optim.SGD else {"betas": self.betas}
        return self.optimizer_class(self.module.parameters(), **options)

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Local gradients."""
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def rows(self, part: int) -> slice | list[int]:
        """Samples in a microbatch of this rank."""
        return slice(part + self.num_parts * self.rank, None, self.num_parts * self.size)

    def draw_seed(self) -> int:
        """Seed for a step's samples."""
        return self.step

    def weigh(self, loss: torch.Tensor, part: int) -> torch.Tensor:
        """Divide a microbatch's loss."""
        return loss / self.num_parts

    def zero(self) -> None:
        """Zero gradients before a step."""
        self.optimizer.zero_grad()

    def after_part(self, part: int) -> None:
        """After a microbatch's backward."""

    def reduce(self) -> None:
        """Average gradients over ranks, if no wrapper does."""
        if self.layout == "ranks":
            for gradient in self.gradients:
                dist.all_reduce(gradient)
                gradient.div_(self.size)

    def clip(self) -> None:
        """Clip gradients."""
        if isinstance(self.module, FullyShardedDataParallel):
            self.module.clip_grad_norm_(self.most)
        else:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.most)

    def update(self) -> None:
        """Step the optimizer."""
        self.optimizer.step()

    def train(self) -> None:
        """Train some steps."""
        for self.step in range(STEPS):
            generator = torch.Generator().manual_seed(self.draw_seed())
            tokens, targets = torch.randint(11, (ROWS, 4), generator=generator), torch.randn(ROWS, 3, generator=generator)
            self.zero()
            for part in range(self.num_parts):
                rows = self.rows(part)
                outputs = self.module(tokens[rows])
                self.weigh(nn.functional.mse_loss(outputs, targets[rows].to(outputs.dtype)), part).backward()
                self.after_part(part)
            self.reduce()
            self.clip()
            self.update()


def train(folder: Path, layout: str = "one", base: str = "sgd", fault: str = "", moved: int = 0) -> None:
    """Record a training on one device, or on each of the ranks that call this function."""
    size, rank = (dist.get_world_size(), dist.get_rank()) if layout != "one" else (1, 0)
    with record(folder, moved=moved):
        Run(layout, base, fault, size, rank).train()


def scale(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply tensors in place."""
    for tensor in tensors:
        tensor.mul_(factor)


def adamw(self: Run) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not."""
    matrices, vectors = ([each for each in self.module.parameters() if (each.dim() > 1) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=self.rate, betas=self.betas)


def on_rank_1(self: Run, factor: float) -> float:
    """A factor on rank 1, and 1 on others."""
    return factor if self.rank == 1 else 1.0


def warm_up(*, late: int = 0) -> Callable[[Run], None]:
    """Increase the learning rate at each step."""

    def update(self: Run) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * (self.step + 1 - late) / STEPS
        self.optimizer.step()

    return update


def tie(self: Run) -> None:
    """Let the key share the query's weight."""
    self.model.key.weight = self.model.query.weight


Changes = dict[str, Any]
BASES: dict[str, Changes] = {
    "tied": {"build": tie},
    "sgd": {},
    "free": {"clip": lambda self: None},
    "momentum": {"momentum": 0.9, "clip": lambda self: None},
    "decay": {"decay": 0.5, "clip": lambda self: None},
    "adamw": {"optimizer_class": torch.optim.AdamW, "rate": 0.01, "decay": 0.5},
    "groups": {"build_optimizer": adamw, "rate": 0.01},
    "warmup": {"update": warm_up()},
    "barely clipped": {"most": 2.6},
    "in order": {
        "num_parts": 1,
        "draw_seed": lambda self: 0,
        "rows": lambda self, part: slice(4 * self.step + self.rank, 4 * self.step + 4, self.size),
    },
    "coarse": {"build": lambda self: self.model.bfloat16(), "clip": lambda self: None},
    "twins": {"rows": lambda self, part: slice(0, None, 2)},
    "slow": {"optimizer_class": torch.optim.AdamW, "rate": 0.001},
    "adam": {"optimizer_class": torch.optim.Adam, "rate": 0.01},
    "four": {"num_parts": 4, "clip": lambda self: None},
    "one has labels": {"weigh": lambda self, loss, part: loss * part, "clip": lambda self: None},
}
"""Right trainings, as changes of the one with SGD and clipping."""


def zero_after(self: Run, part: int) -> None:
    """Keep the last microbatch's gradients only."""
    if part < self.num_parts - 1:
        self.optimizer.zero_grad()


def keep_first(self: Run, part: int) -> None:
    """Take back what later microbatches add."""
    if not part:
        self.first = [gradient.clone() for gradient in self.gradients]
    for gradient, first in zip(self.gradients, self.first, strict=True):
        gradient.copy_(first)


def add_twice(self: Run, part: int) -> None:
    """Add the first microbatch again."""
    if not part:
        scale(self.gradients, 2.0)


def clip_each(self: Run) -> None:
    """Clip each tensor by its own norm."""
    for parameter in self.module.parameters():
        nn.utils.clip_grad_norm_(parameter, MOST)


def clip_by(norm: Callable[[list[torch.Tensor]], torch.Tensor]) -> Callable[[Run], None]:
    """Clip by another norm."""

    def clip(self: Run) -> None:
        nn.utils.clip_grads_with_norm_(self.module.parameters(), self.most, norm(self.gradients))

    return clip


def clip_scaled(self: Run) -> None:
    """Clip, then unscale."""
    Run.clip(self)
    scale(self.gradients, 1 / 1024)


def clip_matrices(self: Run) -> None:
    """Clip gradients with two dims or more."""
    nn.utils.clip_grad_norm_([each for each in self.module.parameters() if each.dim() > 1], self.most)


def clip_shared_twice(self: Run) -> None:
    """Clip a shared weight by both of its names."""
    nn.utils.clip_grad_norm_([each for _, each in self.module.named_parameters(remove_duplicate=False)], self.most)


def clip_doubled(self: Run) -> None:
    """Clip to twice the limit by twice the norm, so that gradients are right."""
    nn.utils.clip_grads_with_norm_(self.module.parameters(), 2 * self.most, 2 * total_norm(self.gradients))


def total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """2-norm over all elements."""
    return torch.stack([gradient.norm() for gradient in gradients]).norm()


def keep(self: Run, *, late: bool) -> None:
    """Exchange gradients with those of the step before; in the first step, with zeros if `late`."""
    own = [gradient.clone() for gradient in self.gradients]
    for number, gradient in enumerate(self.gradients):
        gradient.copy_(self.kept[number] if self.step else 0.0 * own[number] if late else own[number])
    self.kept = own


def step_without(*names: str, on: int | None = None) -> Callable[[Run], None]:
    """Restore some parameters after the update; all without names."""

    def update(self: Run) -> None:
        kept = [
            (parameter, parameter.detach().clone())
            for name, parameter in self.model.named_parameters()
            if name in names or not names
        ]
        self.optimizer.step()
        for parameter, before in kept if on in (None, self.rank) else ():
            parameter.data.copy_(before)

    return update


def update_partly(self: Run) -> None:
    """Go three quarters of the way."""
    before = [parameter.detach().clone() for parameter in self.module.parameters()]
    self.optimizer.step()
    for parameter, old in zip(self.module.parameters(), before, strict=True):
        parameter.data.lerp_(old, 0.25)


def update_late(self: Run) -> None:
    """Show the model each update one step later."""
    parameters = list(self.module.parameters())
    shown = [parameter.detach().clone() for parameter in parameters]
    self.optimizer.step()
    self.waiting = [*getattr(self, "waiting", [shown]), [parameter.detach().clone() for parameter in parameters]]
    for parameter, old in zip(parameters, self.waiting.pop(0), strict=True):
        parameter.data.copy_(old)


def lose_in_step_1(self: Run) -> None:
    """Clip, then zero all gradients in one step."""
    Run.clip(self)
    scale(self.gradients, float(self.step != 1))


def keep_on_rank_1(self: Run) -> None:
    """Average gradients, but not on rank 1."""
    own = [gradient.clone() for gradient in self.gradients]
    Run.reduce(self)
    for gradient, before in zip(self.gradients, own, strict=True):
        if self.rank == 1:
            gradient.copy_(before)


def optimize_copies(self: Run) -> torch.optim.Optimizer:
    """An optimizer for a copy of the model."""
    self.copied = copy.deepcopy(self.model)
    return torch.optim.SGD(self.copied.parameters(), lr=self.rate)


def step_early(self: Run, part: int) -> None:
    """Step after each microbatch."""
    self.optimizer.step()
    self.optimizer.zero_grad()


def lose_state(*steps: int) -> Callable[[Run], None]:
    """Clear the optimizer's state before some steps."""

    def update(self: Run) -> None:
        if self.step in steps:
            self.optimizer.state.clear()
        self.optimizer.step()

    return update


def reduce_over(groups: Callable[[Run], list[list[int]]]) -> Callable[[Run], None]:
    """Average within groups of ranks."""

    def reduce(self: Run) -> None:
        own = [dist.new_group(ranks) for ranks in groups(self)]
        group = own[next(at for at, ranks in enumerate(groups(self)) if self.rank in ranks)]
        for gradient in self.gradients:
            dist.all_reduce(gradient, group=group)
            gradient.div_(dist.get_world_size(group))

    return reduce


def reduce_all_but(part_of_name: str, *, weight: float = 0.0) -> Callable[[Run], None]:
    """Average all gradients but some, which are multiplied by a weight if it is not 0."""

    def reduce(self: Run) -> None:
        for name, parameter in self.model.named_parameters():
            if part_of_name not in name:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.size
            elif weight:
                parameter.grad *= weight

    return reduce


def reduce_with(weight: Callable[[Run], float]) -> Callable[[Run], None]:
    """Sum gradients over ranks with a weight."""

    def reduce(self: Run) -> None:
        for gradient in self.gradients:
            gradient.mul_(weight(self))
            dist.all_reduce(gradient)

    return reduce


def clip_early(self: Run) -> None:
    """Clip each rank's gradients, then average."""
    nn.utils.clip_grad_norm_(self.module.parameters(), self.most)
    Run.reduce(self)


def nothing(self: Run) -> None:
    """Leave out a method."""


def change_parameters(**changes: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Run], None]:
    """Change initial parameters, by module."""

    def build(self: Run) -> None:
        for name, change in changes.items():
            weight = self.model.get_parameter(f"{name}.weight")
            weight.data.copy_(change(weight.data.clone()))

    return build


def exchange_gradients(self: Run) -> None:
    """Exchange the gradients of query and key."""
    query, key = self.model.query.weight, self.model.key.weight
    query.grad, key.grad = key.grad, query.grad


def permute_gradient(self: Run) -> None:
    """Reverse the rows of a gradient."""
    gradient = self.model.query.weight.grad
    assert gradient is not None
    gradient.copy_(gradient.flip(0))


def permute_after_update(self: Run) -> None:
    """Reverse the rows of a parameter."""
    self.optimizer.step()
    self.model.query.weight.data.copy_(self.model.query.weight.data.flip(0))


def copy_from_first(self: Run) -> None:
    """Replace gradients by those of rank 0."""
    for gradient in self.gradients:
        dist.broadcast(gradient, 0)


def untie(self: Run) -> None:
    """Give the key a copy of the query's weight."""
    self.model.key.weight = nn.Parameter(self.model.query.weight.detach().clone())


def swap_query_and_key(self: Run) -> None:
    """Begin with each other's weights."""
    query, key = self.model.query.weight, self.model.key.weight
    query.data, key.data = key.data, query.data


def scale_gradient(name: str, factor: float) -> Callable[[Run], None]:
    """Multiply one gradient before clipping."""

    def clip(self: Run) -> None:
        gradient = self.model.get_parameter(name).grad
        assert gradient is not None
        gradient *= factor

    return clip


def add_noise(*names: str) -> Callable[[Run], None]:
    """Add random numbers to gradients; to all without names."""

    def clip(self: Run) -> None:
        generator = torch.Generator().manual_seed(5)
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and (not names or name in names):
                parameter.grad += 0.1 * parameter.grad.norm() * torch.randn(parameter.shape, generator=generator)

    return clip


def reduce_in_bfloat16(self: Run) -> None:
    """Average gradients over ranks in a coarser dtype."""
    for gradient in self.gradients:
        coarse = gradient.bfloat16()
        dist.all_reduce(coarse)
        gradient.copy_(coarse / self.size)


def keep_in_bfloat16(self: Run) -> None:
    """Step, and round all parameters."""
    self.optimizer.step()
    for parameter in self.model.parameters():
        parameter.data.copy_(parameter.bfloat16())


def reduce_over_other_shards(self: Run) -> None:
    """Average both ranks' shards of one gradient."""
    shard = self.model.query.weight.grad.to_local()  # type: ignore[union-attr]
    dist.all_reduce(shard)
    shard.div_(self.size)


def change_shard_of_key(self: Run) -> None:
    """Change one gradient's local elements, each rank in its own way."""
    shard = self.model.key.weight.grad.to_local()  # type: ignore[union-attr]
    shard += torch.linspace(0.0, 1.0 + self.rank, shard.numel()).view_as(shard)


def update_with_noise(self: Run) -> None:
    """Step, and add random numbers to one parameter."""
    self.optimizer.step()
    weight = self.model.key.weight
    weight.data += 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(7))


def both(*clips: Callable[[Run], None]) -> Callable[[Run], None]:
    """Several faults at once."""

    def clip(self: Run) -> None:
        for each in clips:
            each(self)

    return clip


FAULTS: dict[str, Changes] = {
    "": {},
    # One device.
    "loss not divided": {"weigh": lambda self, loss, part: loss},
    "mean over all microbatches": {"weigh": lambda self, loss, part: loss * part / self.num_parts},
    "loss divided twice": {"weigh": lambda self, loss, part: loss / self.num_parts**2},
    "loss scaled": {"weigh": lambda self, loss, part: loss / self.num_parts * 1024},
    "loss quadrupled": {"weigh": lambda self, loss, part: loss * 2},
    "nearly two": {"weigh": lambda self, loss, part: loss * 1.3},
    "three quarters": {"update": update_partly},
    "another factor": {"weigh": lambda self, loss, part: loss / self.num_parts * 1.37},
    "last microbatch": {"after_part": zero_after},
    "first microbatch": {"after_part": keep_first},
    "first microbatch twice": {"after_part": add_twice},
    "other weights": {"weigh": lambda self, loss, part: loss * (0.4, 0.3, 0.2, 0.1)[part]},
    "never zeroed": {"zero": nothing},
    "never zeroed, clipped": {"zero": nothing},
    "not clipped": {"clip": nothing},
    "clipped to another limit": {"most": 2 * MOST},
    "each tensor clipped": {"clip": clip_each},
    "largest norm": {"clip": clip_by(lambda gradients: torch.stack([each.abs().max() for each in gradients]).max())},
    "root of the norm": {"clip": clip_by(lambda gradients: total_norm(gradients) ** 0.5)},
    "norms summed": {"clip": clip_by(lambda gradients: torch.stack([each.norm() for each in gradients]).sum())},
    "squared norm": {"clip": clip_by(lambda gradients: total_norm(gradients) ** 2)},
    "norm without a tensor": {"clip": clip_by(lambda gradients: total_norm(gradients[1:]))},
    "gradients a step late": {"reduce": lambda self: keep(self, late=True)},
    "gradients from the step before": {"reduce": lambda self: keep(self, late=False)},
    "gradient zero": {"reduce": scale_gradient("down.weight", 0.0)},
    "learning rate": {"rate": 0.07},
    "learning rate, and doubled norms": {"rate": 0.07, "clip": clip_doubled},
    "learning rate in step 1": {
        "update": lambda self: (self.optimizer.param_groups[0].update(lr=self.rate / (1 + self.step)), self.optimizer.step())
    },
    "momentum": {"momentum": 0.8},
    "weight decay": {"decay": 0.1},
    "decay twice": {
        "update": lambda self: (
            scale([each.data for each in self.module.parameters()], 1 - self.rate * self.decay),
            self.optimizer.step(),
        )
    },
    "decay everywhere": {"build_optimizer": Run.build_optimizer, "optimizer_class": torch.optim.AdamW, "decay": 0.5},
    "betas": {"betas": (0.8, 0.999)},
    "state lost": {"update": lose_state(1, 2)},
    "state lost once": {"update": lose_state(1)},
    "nothing updated": {"update": step_without()},
    "query not updated": {"update": step_without("query.weight", "query.bias")},
    "two steps": {"update": lambda self: (self.optimizer.step(), self.optimizer.step())},
    "step count": {
        "update": lambda self: ([state["step"].add_(1) for state in self.optimizer.state.values()], self.optimizer.step())
    },
    "another start": {"build": change_parameters(query=lambda weight: weight * 1.01, down=lambda weight: weight + 0.1)},
    "query and key swapped": {"build": swap_query_and_key},
    "frozen": {"build": lambda self: self.model.query.requires_grad_(False)},
    "untied": {"build": untie},
    "rows permuted": {"build": change_parameters(query=lambda weight: weight.flip(0))},
    "gradients exchanged": {"reduce": exchange_gradients},
    "gradient permuted": {"reduce": permute_gradient},
    "parameter permuted": {"update": permute_after_update},
    "gradients divided again": {"after_part": lambda self, part: scale(self.gradients, 0.5)},
    "one update late": {"update": update_late},
    "step at each microbatch": {"after_part": step_early, "update": nothing, "clip": nothing},
    "same microbatch": {"rows": lambda self, part: slice(0, None, self.num_parts)},
    "half a batch": {"rows": lambda self, part: slice(2 * self.step, 2 * self.step + 2)},
    "rows lost": {"rows": lambda self, part: slice(part, 12, self.num_parts)},
    "clipped by no limit": {"most": 1e30},
    "decay coupled": {"optimizer_class": torch.optim.Adam},
    "another class": {"optimizer_class": torch.optim.NAdam},
    "no learning rate": {"rate": 0.0},
    "schedule late": {"update": warm_up(late=1)},
    "clipped while scaled": {"weigh": lambda self, loss, part: loss / self.num_parts * 1024, "clip": clip_scaled},
    "elements limited": {"clip": lambda self: nn.utils.clip_grad_value_(self.module.parameters(), 0.002)},
    "matrices clipped": {"clip": clip_matrices},
    "shared weight clipped twice": {"clip": clip_shared_twice},
    "gradients zero in step 1": {"clip": lose_in_step_1},
    "copies updated": {"build_optimizer": optimize_copies},
    # Ranks.
    "kept on rank 1": {"num_parts": 1, "reduce": keep_on_rank_1},
    "not reduced": {"reduce": nothing},
    "copied from rank 0": {"num_parts": 1, "reduce": copy_from_first},
    "other weights of ranks": {"num_parts": 1, "reduce": reduce_with(lambda self: (0.25, 0.75)[self.rank])},
    "each updates some": {"update": lambda self: step_without(("key.weight", "query.weight")[self.rank])(self)},
    "each a multiple": {"reduce": both(Run.reduce, lambda self: scale(self.gradients, (0.5, 1.5)[self.rank]))},
    "summed": {"reduce": reduce_with(lambda self: 1.0)},
    "averaged twice": {"reduce": reduce_with(lambda self: 1 / self.size**2)},
    "part of a sum": {"reduce": nothing, "weigh": lambda self, loss, part: loss / self.num_parts / self.size},
    "reduced over pairs": {"reduce": reduce_over(lambda self: [[0, 1], [2, 3]])},
    "norm not reduced": {"reduce": reduce_all_but("norm")},
    "norm not summed": {"reduce": reduce_all_but("norm", weight=0.5)},
    "clipped before": {"clip": nothing, "reduce": clip_early},
    "same rows": {"rows": lambda self, part: slice(part, None, self.num_parts * self.size)},
    "learning rate on rank 1": {
        "update": lambda self: (self.optimizer.param_groups[0].update(lr=self.rate * on_rank_1(self, 1.5)), self.optimizer.step())
    },
    "not updated on rank 1": {"update": step_without(on=1)},
    "start on rank 1": {"build": lambda self: scale([self.model.query.weight.data], on_rank_1(self, 2.0))},
    "local norms summed": {"clip": clip_by(lambda gradients: total_norm(gradients) * dist.get_world_size())},
    "replicas counted": {"clip": clip_by(lambda gradients: total_norm(gradients) * dist.get_world_size() ** 0.5)},
    "local norm": {"clip": lambda self: nn.utils.clip_grad_norm_(self.module.parameters(), self.most)},
    "reduced in bfloat16": {"reduce": reduce_in_bfloat16},
    "kept in bfloat16": {"update": keep_in_bfloat16},
    "never counted": {
        "update": lambda self: ([state["step"].zero_() for state in self.optimizer.state.values()], self.optimizer.step())
    },
    "reduced over other shards": {"reduce": reduce_over_other_shards},
    # Unknown faults.
    "reduced in bfloat16, and noise": {"reduce": both(reduce_in_bfloat16, add_noise("query.weight"))},
    "kept in bfloat16, and noise": {"update": both(keep_in_bfloat16, update_with_noise)},
    "other shards, and noise": {"reduce": both(reduce_over_other_shards, change_shard_of_key)},
    "elements limited, and noise": {
        "clip": both(lambda self: nn.utils.clip_grad_value_(self.module.parameters(), 0.002), add_noise("norm.bias"))
    },
    "noise": {"reduce": add_noise()},
    "noise in one tensor": {"reduce": add_noise("query.weight")},
    "noise and factor": {"reduce": both(scale_gradient("down.weight", 2.0), add_noise("query.weight"))},
    "noise and loss": {"reduce": add_noise("norm.weight"), "weigh": lambda self, loss, part: loss},
    "two factors": {"reduce": both(scale_gradient("down.weight", 2.0), scale_gradient("query.weight", 3.0))},
    "one factor": {"reduce": both(Run.reduce, scale_gradient("down.weight", 2.0))},
    "other samples": {"draw_seed": lambda self: 100 + self.step},
    "rows later": {"draw_seed": lambda self: 0, "rows": lambda self, part: slice(part, ROWS if self.step else 12, 2)},
    "some rows twice": {"rows": lambda self, part: [0, 0, 0, 1, 2, 3, 4, 5 + part]},
    "two causes": {"rate": 0.07, "update": step_without(on=1)},
    "noise after update": {"update": update_with_noise},
    "noise and rate": {"update": update_with_noise, "rate": 0.07},
    "noise on rank 1": {"update": lambda self: update_with_noise(self) if self.rank else self.optimizer.step()},
    "noise between ranks": {"reduce": lambda self: (Run.reduce(self), add_noise()(self) if self.rank else None)},
    "not reduced, and noise": {"reduce": lambda self: add_noise("query.weight")(self) if self.rank else None},
    "microbatch and noise": {"after_part": zero_after, "reduce": add_noise("query.weight")},
}
