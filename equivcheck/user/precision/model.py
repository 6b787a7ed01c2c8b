"""A model on one device that rounds at the same points as the ranks.

Each part of the rows goes through its own copy of the model, as on ranks, with parameters cast again at every step. After
backward, the gradients from all parts are rounded and averaged as ranks do it. Master parameters stay in the original model, and
the optimizer updates them there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from equivcheck.layouts.base.rounding import Rounding
from equivcheck.oracle.reference.perturbed_rounding import Jitter
from equivcheck.oracle.reference.reduction import Averaging
from equivcheck.user.batches import map_tensors, tensors_of
from equivcheck.user.precision.autograd_private import when_backward_ends
from equivcheck.user.precision.policy import torch_type
from equivcheck.user.randomness import set_row_shard
from equivcheck.user.task import Loss

Drift: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Function that perturbs an updated parameter by as much as rounding could."""


class RoundedModel(nn.Module):
    """Model for one device that rounds as ranks do: it calls a copy of the user's model with each rank's part of the rows."""

    def __init__(self, module: nn.Module, rounding: Rounding, casting: Collection[str], jitter: Jitter, drift: Drift) -> None:
        """`casting` names submodules that cast their inputs, such as `fully_shard` units.

        `jitter` perturbs rounding, and `drift` perturbs updates.
        """
        super().__init__()
        self.module, self.rounding, self.jitter, self.drift = module, rounding, jitter, drift
        self._averaging = Averaging(
            division=rounding.division, divisor=rounding.num_parts, shards=rounding.shards, ordered=jitter.ordered
        )
        self._copies = [copy.deepcopy(module) for _ in range(rounding.num_parts)]
        for number, each in enumerate(self._copies):
            set_row_shard(each, number, rounding.num_parts)
        self._cast = [dict(_cast(each, rounding).named_parameters()) for each in self._copies]
        # Buffers are read from the original model, so its first copy updates them in place.
        for original, first in zip(module.modules(), self._copies[0].modules(), strict=True):
            first._buffers = original._buffers
        for leaf in (leaf for cast in self._cast for leaf in cast.values() if leaf.requires_grad):
            leaf.register_post_accumulate_grad_hook(self._begin_reduction)  # type: ignore[no-untyped-call]
        for each in self._copies:
            units = [unit for name, unit in each.named_modules() if name in casting]
            for unit in units:
                unit.register_forward_pre_hook(partial(self._unit_inputs, has_own_parameters(unit, units)), with_kwargs=True)
        self._loaded: dict[str, torch.Tensor] = {}
        self._steps, self._reduces = 0, False
        self._latest: tuple[Any, list[Any]] = (None, [])
        self.divides_inexactly = False
        """Whether the model joined its outputs and gradients were divided by a number that is not a power of two."""

    def __getattr__(self, name: str) -> Any:
        """Forward attributes to the original model, because a user's step may read these attributes."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Call each copy of the model with its part of the rows, and join their outputs."""
        self._load()
        count, rows = self.rounding.num_parts, num_rows((arguments, keywords))
        outputs = []
        for number, each in enumerate(self._copies):
            own, named = map_tensors(part((arguments, keywords), number, count, rows), self._as_computed)
            outputs.append(combine_tensors([each(*own, **named)], self._as_returned))
        self._latest = combine_tensors([join_parts(outputs)], self._watched), outputs
        return self._latest[0]

    def loss_by_parts(self, loss: Loss, reduction: str) -> Loss:
        """Return a loss function that computes the user's `loss` for each rank's part of the rows, and then their mean or sum."""
        count = self.rounding.num_parts
        share, factor = (1.0 / count, 1.0) if reduction == "mean" else (1.0, float(count))

        def by_parts(outputs: Any, targets: Any) -> Any:
            full, parts = self._latest
            is_own = outputs is full
            given = parts if is_own else [part(outputs, number, count) for number in range(count)]
            losses = [loss(each, part(targets, number, count)) for number, each in enumerate(given)]
            return Total.apply(share, factor if is_own else share, *losses)  # type: ignore[no-untyped-call]

        return by_parts

    def _watched(self, outputs: torch.Tensor) -> torch.Tensor:
        if outputs.requires_grad and self.rounding.num_parts.bit_count() > 1:
            outputs.register_hook(lambda _gradient: setattr(self, "divides_inexactly", True))  # type: ignore[no-untyped-call]
        return outputs

    def _unit_inputs(self, has_parameters: bool, _unit: nn.Module, *given: Any) -> Any:
        """Positional and keyword inputs for a unit: cast, and with gradients summed inside the unit first."""
        inputs = map_tensors(given, self._as_computed)
        return sum_gradients_inside(inputs) if has_parameters else inputs

    def _as_computed(self, tensor: torch.Tensor) -> torch.Tensor:
        kind = self.rounding.compute
        return tensor.to(torch_type(kind)) if kind is not None and tensor.is_floating_point() else tensor

    def _as_returned(self, tensor: torch.Tensor) -> torch.Tensor:
        kind = self.rounding.output
        if kind is None or not tensor.is_floating_point():
            return tensor
        return self.jitter.rounded(tensor, tensor.to(torch_type(kind)))

    def _load(self) -> None:
        """Cast the current parameters into the copies.

        Without a change, the old copies stay, because backward may still need them.
        """
        for own, others in zip(self.module.modules(), zip(*(each.modules() for each in self._copies), strict=True), strict=True):
            for other in others:
                other.training = own.training
        masters = dict(self.module.named_parameters())
        if self._loaded and all(torch.equal(self._loaded[name], master) for name, master in masters.items()):
            return
        self.jitter.begin(self._steps)
        with torch.no_grad():
            for name, master in masters.items():
                updated = self._steps > 0 and master.requires_grad
                self._cast[0][name].copy_(self.drift(master) if updated else master)
            self.jitter.flip(self._cast[0], masters)
            for cast in self._cast[1:]:
                for name, leaf in cast.items():
                    leaf.copy_(self._cast[0][name])
        self._steps += 1
        self._loaded = {name: master.detach().clone() for name, master in masters.items()}

    def _begin_reduction(self, _leaf: torch.Tensor) -> None:
        """Schedule one reduction at the end of the current backward pass."""
        if not self._reduces:
            self._reduces = True
            when_backward_ends(self._reduce)

    def _reduce(self) -> None:
        self._reduces = False
        for name, master in self.module.named_parameters():
            leaves = [cast[name] for cast in self._cast]
            if any(leaf.grad is not None for leaf in leaves):
                mean = self._averaging.mean([self._as_reduced(leaf, master) for leaf in leaves]).to(master.dtype)
                master.grad = mean if master.grad is None else master.grad + mean
            for leaf in leaves:
                leaf.grad = None

    def _as_reduced(self, leaf: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
        """Return a part's gradient in the reduction type. It is zero if only other parts have a gradient."""
        kind = self.rounding.reduce
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        return self.jitter.rounded(gradient, gradient.to(master.dtype if kind is None else torch_type(kind), copy=True))


def _cast(module: nn.Module, rounding: Rounding) -> nn.Module:
    """Cast parameters, but not buffers, to the compute type."""
    if rounding.compute is not None:
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(torch_type(rounding.compute))
    return module


def has_own_parameters(unit: nn.Module, units: Sequence[nn.Module]) -> bool:
    """Whether an FSDP unit has parameters that no inner unit has. FSDP2 changes backward only in such units."""
    inner = {parameter for other in unit.modules() if other is not unit and other in units for parameter in other.parameters()}
    return any(parameter not in inner for parameter in unit.parameters())


def sum_gradients_inside(inputs: Any) -> Any:
    """Return the inputs, changed so that backward sums their gradients inside the module first.

    Gradients from other modules are added afterwards. FSDP2 adds in this order, because it passes a unit's inputs through an
    autograd function. In low precision the order matters if several units read one activation, such as an encoder's output.
    """
    watched = [tensor for tensor in tensors_of(inputs) if tensor.requires_grad]
    if not watched or not torch.is_grad_enabled():
        return inputs
    passed = iter(_Identity.apply(*watched))  # type: ignore[no-untyped-call]
    return map_tensors(inputs, lambda tensor: next(passed) if tensor.requires_grad else tensor)


class _Identity(torch.autograd.Function):
    """Return several tensors unchanged."""

    @staticmethod
    def forward(_ctx: Any, *tensors: torch.Tensor) -> Any:
        return tensors

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients


def part(value: Any, number: int, count: int, rows: int | None = None) -> Any:
    """Return `value` with each tensor that has `rows` rows replaced by part `number`.

    Its rows are divided into `count` equal parts. If `rows` is None, every tensor whose rows can be split evenly is split. Parts
    are copies; other tensors stay unchanged.
    """

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        fits = tensor.dim() > 0 and tensor.shape[0] % count == 0 and rows in (None, tensor.shape[0])
        return tensor.chunk(count)[number].clone() if fits and count > 1 else tensor

    return map_tensors(value, cut)


def num_rows(value: Any) -> int | None:
    """Return the number of rows in the first tensor that has any; None if no tensor has rows."""
    return next((tensor.shape[0] for tensor in tensors_of(value) if tensor.dim()), None)


def join_parts(values: Sequence[Any]) -> Any:
    """Join the outputs for all parts of the rows into one structure.

    Tensors are concatenated, scalars averaged; other values come from the first part.
    """
    return combine_tensors(values, _Joined.apply)


def combine_tensors(values: Sequence[Any], combine: Callable[..., torch.Tensor]) -> Any:
    """Apply `combine` to the tensors at the same position in all `values`.

    Returns the structure of the first value, with the results as its tensors.
    """
    first = values[0]
    if isinstance(first, torch.Tensor):
        return combine(*values)
    if isinstance(first, dict):
        full = copy.copy(first)
        for key in first:
            full[key] = combine_tensors([value[key] for value in values], combine)
        return full
    if isinstance(first, (tuple, list)):
        members = [combine_tensors(group, combine) for group in zip(*values, strict=True)]
        return type(first)(*members) if hasattr(first, "_fields") else type(first)(members)
    return first


class _Joined(torch.autograd.Function):
    """Concatenates rows, or averages scalars. In backward each part gets its gradient times the number of parts."""

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> torch.Tensor:
        ctx.count = len(parts)
        if parts[0].dim():
            return torch.cat(parts)
        return torch.stack(parts).mean() if parts[0].is_floating_point() else parts[0].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return (gradient * ctx.count).chunk(ctx.count) if gradient.dim() else (gradient,) * ctx.count


class Total(torch.autograd.Function):
    """Autograd function for the mean or sum of the parts' losses, in float64.

    In backward, each part's loss gets the total's gradient, multiplied by `factor`.
    """

    @staticmethod
    def forward(ctx: Any, share: float, factor: float, *losses: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses, multiplied by `share`: 1 for a sum, or one divided by the number of parts for a mean."""
        ctx.factor, ctx.kinds = factor, [loss.dtype for loss in losses]
        return torch.stack([loss.double() for loss in losses]).sum() * share

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient for each loss: the total's gradient multiplied by `factor`, in the loss's type."""
        return None, None, *((gradients[0] * ctx.factor).to(kind) for kind in ctx.kinds)
