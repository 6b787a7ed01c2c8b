"""Train several copies of a single-device training in one pass, each with its own parameters and data.

Every tensor has the copies along dim 0. Linear models have batched functions for that. Other models use `torch.vmap`, which gives
the same results in twice the time. Nothing mixes copies: matmuls are batched, losses and norms are computed for each copy, and
one backward gives each copy its own gradient. Optimizers must be elementwise, with step counts that do not depend on values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from equivcheck.scenario import ClipNorm, ClipValue, CrossEntropy, Layer, Training, ZeroGrad
from equivcheck.training.balance import balance_loss, routing_loads
from equivcheck.training.choices import RecordedChoices
from equivcheck.training.layers.linear.module import LayerFunctions, layer_output
from equivcheck.training.layers.linear.shape_ops import added_constant
from equivcheck.training.layers.module import ACTIVATIONS
from equivcheck.training.layers.parameters import SCALE, parameters_of
from equivcheck.training.layers.registry import layer_kind
from equivcheck.training.loss import loss_of
from equivcheck.training.material import Batch
from equivcheck.training.model import MLP, build_model, offset_of
from equivcheck.training.update.optimizer import build_optimizer, build_schedule
from equivcheck.training.update.router_bias import count_recorded_choices, update_router_biases

Array = npt.NDArray[np.floating]

CLIP_EPS = 1e-6
"""Term that `torch.nn.utils.clip_grad_norm_` adds to the norm before dividing."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EnsembleStep:
    """Values from one step for all model copies, stacked along dim 0."""

    loss: Array
    """Loss for each copy, shape (copies,)."""
    present: tuple[bool, ...]
    """For each parameter, whether it has a gradient. This is equal in all copies."""
    gradients: Array
    """Gradients after the last backward, before clipping; shape (copies, elements of all present gradients)."""
    clip_norm: Array | None
    """Gradient norm before clipping, shape (copies,); None without clipping by norm."""
    clipped: Array | None
    """Gradients after clipping, shaped like `gradients`; None without clipping."""
    parameters: Array
    """Parameters after the update, shape (copies, elements of all parameters)."""
    routes_alike: bool = True
    """Whether all copies chose the same experts for each token."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EnsembleTrace:
    """Values from a whole run for all model copies. Buffers are left out, because they do not depend on parameters or data."""

    steps: tuple[EnsembleStep, ...]
    """One entry for each training step."""
    state_names: tuple[str, ...]
    """``parameter/key`` for each tensor in the optimizer state, in a single run's order."""
    state: Array
    """Optimizer state, shape (copies, elements of all state tensors). Scalars such as step counts are repeated for each copy."""

    def moments(self) -> Iterator[Array | None]:
        """Yield all copies' values for each moment that the function `moments` returns for a trace, in the same order.

        The last value is None, because buffers are not recorded.
        """
        for step in self.steps:
            yield step.loss[:, None]
            yield step.gradients
            if step.clip_norm is not None:
                yield step.clip_norm[:, None]
            if step.clipped is not None:
                yield step.clipped
            yield step.parameters
        yield self.state
        yield None


Tensors = tuple[torch.Tensor, ...]
Use = tuple[dict[str, Any], str]
"""A module's `_parameters` dict and the name in it."""
Losses = Callable[[Batch, int, float], tuple[torch.Tensor, bool]]
"""Computes losses and gradients from a microbatch, a step index and the microbatch's share in the step's loss.

Returns the loss for each copy, and whether all copies routed their positions identically."""


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    training: Training
    losses: Losses
    parameters: tuple[torch.Tensor, ...]
    optimizer: torch.optim.Optimizer
    model: nn.Module | None
    """Module that computes the losses of all copies; None for batched functions."""


def train_ensemble(training: Training, parameters: Mapping[str, torch.Tensor], steps: Sequence[Sequence[Batch]]) -> EnsembleTrace:
    """Train several model copies in one pass, each with its own initial parameters and data.

    Args:
        training: Training of each copy; its own parameters and data are not used.
        parameters: Initial parameters with shape (copies, *shape) by canonical name, ordered like `Material.parameters`.
        steps: Microbatches for each step. Inputs have shape (copies, rows, features), and targets (copies, rows, outputs).
            If the batch dim is 1, their last two dims are swapped. All copies use the same dropout masks, shape (rows, width).
    """
    trained = {parameter.full_name: parameter.trained for parameter in parameters_of(training.model)}
    copied = {name: values.clone().requires_grad_(trained[name]) for name, values in parameters.items()}
    optimizer = build_optimizer(training, copied.items())
    model = None if _is_batched(training) else _mapped_model(training, copied)
    losses = _batched_losses(training, copied) if model is None else _mapped_losses(training, copied, model)
    run = _Run(training, losses, tuple(copied.values()), optimizer, model)
    schedule = build_schedule(training.schedule, optimizer)
    kept = []
    for index, microbatches in enumerate(steps):
        kept.append(_step(run, microbatches, index))
        if schedule is not None:
            schedule.step()
    state_names, state = _state(optimizer, copied)
    return EnsembleTrace(steps=tuple(kept), state_names=state_names, state=state)


def _is_batched(training: Training) -> bool:
    model = training.model
    plain = model.length is None and not isinstance(training.loss, CrossEntropy)
    return plain and all(isinstance(layer, Layer) for layer in model.layers)


def _mapped_model(training: Training, parameters: Mapping[str, torch.Tensor]) -> MLP:
    """Build a module that `torch.vmap` can map, with the first copy's parameters."""
    first = {name: values[0].detach() for name, values in parameters.items()}
    layers = tuple(layer_kind(layer).with_known_shapes(layer) for layer in training.model.layers)
    model = build_model(replace(training.model, counter=False, layers=layers), first, training.data.batch_dim)
    if model.embedding is not None and model.embedding.padding_idx is not None:
        model.embedding.forward = partial(_embedded, model.embedding, model.embedding.padding_idx)  # type: ignore[method-assign]
    return model


def _mapped_losses(training: Training, parameters: Mapping[str, torch.Tensor], model: MLP) -> Losses:
    """Return a function to compute losses and gradients by `torch.vmap` over the module."""
    choices = RecordedChoices(model)
    uses, values = _uses(model), tuple(parameters.values())
    places = [uses[name] for name in parameters]

    def losses(batch: Batch, index: int, share: float) -> tuple[torch.Tensor, bool]:
        def loss(own: Tensors, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
            _use(places, own)
            outputs = model(inputs, batch.masks, index)
            found = loss_of(training, outputs, targets, batch.divisor) * share
            if training.model.balances:
                found = found + _balance_loss(training, model, inputs.shape[batch.batch_dim], index)
            return found, choices.take_all()

        with warnings.catch_warnings():
            # Fused attention is run copy by copy, which torch remarks on.
            warnings.simplefilter("ignore")
            each, chosen = torch.vmap(loss)(values, batch.inputs, batch.targets)
        each.backward(torch.ones_like(each))  # type: ignore[no-untyped-call]
        if training.model.has_router_bias:
            count_recorded_choices(model, [copies[0] for copies in chosen])
        return each.detach(), all(bool((copies == copies[0]).all()) for copies in chosen)

    return losses


def _balance_loss(training: Training, model: nn.Module, rows: int, index: int) -> torch.Tensor:
    loads, positions = routing_loads(model), rows * (training.model.length or 1)
    return balance_loss(loads, [load.counts for load in loads], positions) * (rows / training.rows_at(index))


def _embedded(module: nn.Embedding, padding: int, tokens: torch.Tensor) -> torch.Tensor:
    """Look up embeddings under `torch.vmap`, which decomposes backward and so ignores `padding_idx`."""
    values = functional.embedding(tokens, module.weight)
    return values.where(tokens.ne(padding).unsqueeze(-1), values.detach())


def _uses(model: nn.Module) -> dict[str, list[Use]]:
    """Map each parameter's name to the modules with this parameter. A shared parameter has several modules."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[str, list[Use]] = {name: [] for name in names.values()}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            # Assigning to the dict skips `nn.Module.__setattr__`, which refuses tensors that are not parameters.
            found[names[parameter]].append((module._parameters, attribute))
    return found


def _use(uses: Sequence[Sequence[Use]], values: Tensors) -> None:
    """Replace the modules' parameters. `torch.func.functional_call` does the same but takes longer than a small layer."""
    for places, value in zip(uses, values, strict=True):
        for kept, attribute in places:
            kept[attribute] = value


def _batched_losses(training: Training, parameters: Mapping[str, torch.Tensor]) -> Losses:
    """Return a function to compute losses and gradients by batched functions for linear layers."""
    model, scale = training.model, parameters.get(SCALE.full_name)
    blocks = tuple(_block(layer, index, parameters) for index, layer in enumerate(model.linears))

    def losses(batch: Batch, index: int, share: float) -> tuple[torch.Tensor, bool]:
        values = batch.inputs.mT if batch.batch_dim else batch.inputs
        for block, mask in zip(blocks, batch.masks, strict=True):
            values = layer_output(block, values, mask, index)
        if scale is not None:
            values = values * scale.view(-1, 1, 1)
        if model.offset:
            values = values + offset_of(model, values.dtype)
        loss = _losses(training, values.mT if batch.batch_dim else values, batch.targets)
        loss = loss if share == 1.0 else loss * share
        loss.backward(torch.ones_like(loss))  # type: ignore[no-untyped-call]
        return loss.detach(), True

    return losses


def _block(layer: Layer, index: int, parameters: Mapping[str, torch.Tensor]) -> LayerFunctions:
    path, owner = f"layers.{index}", index if layer.shares is None else layer.shares
    weight, auxiliary = parameters[f"layers.{owner}.linear.weight"], parameters.get(f"{path}.auxiliary.weight")
    norm_weight, norm_bias = (parameters.get(f"{path}.norm.{name}") for name in ("weight", "bias"))
    constant = added_constant(layer.shape_op, layer.width, weight.dtype)
    return LayerFunctions(
        layer=layer,
        norm=None if norm_weight is None else partial(_normalise, norm_weight, norm_bias),
        linear=partial(_linear, weight, parameters.get(f"{path}.linear.bias")),
        auxiliary=None if auxiliary is None else partial(_linear, auxiliary, None),
        activation=ACTIVATIONS.get(layer.activation),
        shape_op=None if constant is None else constant.add,
    )


def _step(run: _Run, microbatches: Sequence[Batch], index: int) -> EnsembleStep:
    run.optimizer.zero_grad(set_to_none=run.training.zero_grad is ZeroGrad.NONE)
    loss, routes_alike = _accumulate(run, microbatches, index)
    grads = [parameter.grad for parameter in run.parameters]
    there = [grad for grad in grads if grad is not None]
    gradients = _rows(there)
    clip_norm = _clip(run, there)
    clipped = None if run.training.clipping is None else _rows(there)
    run.optimizer.step()
    if run.model is not None and run.training.model.has_router_bias:
        update_router_biases(run.model, lambda counts: counts)
    return EnsembleStep(
        loss=loss.numpy(),
        present=tuple(grad is not None for grad in grads),
        gradients=gradients,
        clip_norm=None if clip_norm is None else clip_norm.numpy(),
        clipped=clipped,
        parameters=_rows([parameter.detach() for parameter in run.parameters]),
        routes_alike=routes_alike,
    )


def _accumulate(run: _Run, microbatches: Sequence[Batch], index: int) -> tuple[torch.Tensor, bool]:
    training, total, alike = run.training, torch.zeros(()), True
    for batch in microbatches:
        averages = training.loss.is_mean and len(microbatches) > 1
        share = batch.inputs.shape[1 + batch.batch_dim] / training.rows_at(index) if averages else 1.0
        loss, same = run.losses(batch, index, share)
        total, alike = total + loss, alike and same
    return total, alike


def _normalise(weight: torch.Tensor, bias: torch.Tensor | None, inputs: torch.Tensor) -> torch.Tensor:
    """Apply a layer norm, or an RMS norm if there is no bias."""
    features = inputs.shape[-1:]
    if bias is None:
        return functional.rms_norm(inputs, features) * weight.unsqueeze(1)
    return functional.layer_norm(inputs, features) * weight.unsqueeze(1) + bias.unsqueeze(1)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None, inputs: torch.Tensor) -> torch.Tensor:
    turned = weight.transpose(1, 2)
    return torch.bmm(inputs, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), inputs, turned)


def _losses(training: Training, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    errors = outputs - targets
    if not training.loss.is_linear:
        errors = errors.square()
    return errors.mean((1, 2)) if training.loss.is_mean else errors.sum((1, 2))


def _clip(run: _Run, gradients: list[torch.Tensor]) -> torch.Tensor | None:
    clipping = run.training.clipping
    if isinstance(clipping, ClipNorm):
        return _clip_norm(clipping, gradients)
    if isinstance(clipping, ClipValue):
        nn.utils.clip_grad_value_(run.parameters, clipping.clip_value)
    return None


def _clip_norm(clipping: ClipNorm, gradients: list[torch.Tensor]) -> torch.Tensor:
    order = float(clipping.norm_type.value)
    norms = torch.stack([torch.linalg.vector_norm(_flat(gradient), order, dim=1) for gradient in gradients])
    total: torch.Tensor = torch.linalg.vector_norm(norms, order, dim=0)
    factor = (clipping.max_norm / (total + CLIP_EPS)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.view(-1, *(1,) * (gradient.ndim - 1)))
    return total


def _rows(tensors: list[torch.Tensor]) -> Array:
    rows: Array = torch.cat([_flat(tensor) for tensor in tensors], dim=1).numpy()
    return rows


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Reshape to (copies, elements)."""
    return tensor.reshape(len(tensor), -1)


def _state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> tuple[tuple[str, ...], Array]:
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    copies = len(next(iter(parameters.values())))
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensor = torch.as_tensor(value).detach()
            names.append(f"{name}/{key}")
            tensors.append(tensor if tensor.shape == parameter.shape else tensor.reshape(1, -1).expand(copies, -1))
    return tuple(names), _rows(tensors) if tensors else np.empty((copies, 0))
