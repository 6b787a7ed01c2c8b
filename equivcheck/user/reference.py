"""Trains on one device, and measures the rounding noise of this run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from equivcheck.errors import UsageError
from equivcheck.oracle.reference.doubt import Doubt, doubt_about
from equivcheck.oracle.reference.noise import NUM_CONFIRMATIONS, NUM_PERTURBATIONS, Expected, expected_of
from equivcheck.oracle.reference.reference import Reference
from equivcheck.training.threads import one_thread
from equivcheck.user.batches import convert_batch, perturb_batch, perturbation_factors, same_loss_ranks, split
from equivcheck.user.loop import train
from equivcheck.user.messages.hints import note_on
from equivcheck.user.randomness import Masked, RowShard, seed_generators
from equivcheck.user.ranks import build_model
from equivcheck.user.resuming.parts import WHOLE, Part, second_part
from equivcheck.user.task import Task
from equivcheck.user.traces.names import TensorNames
from equivcheck.user.traces.outside import state_outside
from equivcheck.user.traces.reader import Reader
from equivcheck.user.traces.settings import UserTrace
from equivcheck.user.usage import invalid
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.moments import moments
from equivcheck.worlds.trace.tensors import Numbers, full_vector, norms
from equivcheck.worlds.trace.trace import Snapshot, Trace

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
"""Modules whose `p` is a dropout rate."""


class SingleDeviceRun:
    """The single-device run of a user's training. Copies of it with perturbed values measure its rounding noise.

    In a copy, weights and batches are changed by up to one unit in the last place.
    """

    def __init__(self, task: Task) -> None:
        """Train once. Raises `UsageError` if two models or two trainings from the same seed differ."""
        self.task = task
        self._copies: list[UserTrace] = []
        with one_thread():
            model, untouched = _same_model_twice(task)
            with _Precision() as precision:
                self.trace = self.train(seed=task.seed, model=model)
            self.outside = state_outside(task, model)
            pairs = zip(model.parameters(), untouched.parameters(), strict=False)
            self.changes_parameters = any(not torch.equal(after, before) for after, before in pairs)
            self.element_types = precision.seen.union(self._tensors())
            self.precision = coarsest_type(self.element_types)
            self.eps = eps_of(self.precision)
            # Another seed must not matter: on ranks every rank would draw its own numbers.
            _require_same_training(model, self.trace, self.train(seed=task.seed + 1))

    def train(self, *, seed: int, model: nn.Module | None = None, batches: Sequence[Any] | None = None) -> UserTrace:
        """Train on one device, and return the trace. `model` and `batches` replace those of the training."""
        return trace_of(self.task, seed=seed, model=model, batches=batches)

    def reference(self) -> Reference:
        """Return the reference for a first comparison.

        It is quick, because only a few perturbed copies of the run measure its noise.
        """
        return self._reference(NUM_PERTURBATIONS, None)

    def confirming_reference(self, parts: Trace | None) -> Reference:
        """Return the reference for confirming a divergence. Many perturbed copies of the run measure its noise.

        `parts` is the trace from `parts()`; if it is not None, its differences count as noise, too.
        """
        return self._reference(NUM_PERTURBATIONS + NUM_CONFIRMATIONS, parts)

    def parts(self) -> Trace | None:
        """Train on one device with each data rank's rows as a microbatch, and return the trace.

        None if there is one data rank, or if the user brings `shard` or `step`.
        """
        task = self.task
        if task.num_data_ranks == 1 or task.shard is not None or task.step is not None:
            return None
        cut = RowShard(count=task.num_data_ranks, in_turn=True)
        with one_thread():
            batches = [split(batch, task.num_data_ranks) for batch in task.batches]
            return self.train(seed=task.seed, batches=batches, model=build_model(task, cut))

    def far_moment(self, reference: Reference, parts: Trace | None) -> Expected | None:
        """Return the first compared point at which `parts` and the reference agree in less than half of the digits.

        None if there is none. `parts` is the run that processes the ranks' rows part by part.
        """
        return None if parts is None else far_moment(reference, parts)

    def _reference(self, num_copies: int, parts: Trace | None) -> Reference:
        with one_thread():
            while len(self._copies) < num_copies:
                self._copies.append(self.train(seed=self.task.seed, **perturbed_start(self.task, len(self._copies), self.eps)))
        return reference_from(self.task, self.trace, self._copies, self.eps, *(() if parts is None else (parts,)))

    def _tensors(self) -> list[torch.dtype]:
        names = {name for step in self.trace.steps for name in step.parameters.dtypes}
        return [dtype for dtype in (getattr(torch, name) for name in names) if dtype.is_floating_point]


def reference_from(
    task: Task, trace: Trace, copies: Sequence[Trace], eps: float, *others: Trace, limit: float | None = None
) -> Reference:
    """Return a reference with tolerances. Its noise is the spread of `copies`, in units of `eps`.

    `others` are further runs of the same training. If a value's noise exceeds `limit`, the check cannot decide about this value.
    The limit is relative; by default it is the square root of `eps`, half of the digits.
    """
    limit, groups = float(np.sqrt(eps)) if limit is None else limit, same_loss_ranks(task)
    before, groups = (groups, same_loss_ranks(second_part(task))) if task.resume is not None else ((), groups)
    runs = [[moment.snapshot.values for moment in moments(each)] for each in (trace, *copies)]
    if len({len(run) for run in runs}) > 1:
        return Reference((), Doubt(reason="rounding decides which values the step returns", step=0), limit)
    rows = list(zip(*runs, strict=True))
    if any(len({len(row) for row in values}) > 1 for values in rows):
        return Reference((), Doubt(reason="rounding decides which parameters get a gradient", step=0), limit)
    found = expected_of(trace, rows, eps, *others)
    has_gradients = any(any(moment.present) for moment in found if moment.phase is Phase.GRADIENT)
    doubt = doubt_about(found, limit, needs_gradients=has_gradients)
    return Reference(found, doubt, limit, loss_groups=groups, loss_groups_before=before)


def far_moment(reference: Reference, trace: Trace) -> Expected | None:
    """Return the first compared point at which `trace` and the reference agree in less than half of the digits.

    Returns None if there is none. `trace` is another single-device run.
    """
    for expected, moment in zip(reference.moments, moments(trace), strict=True):
        if moment.snapshot.present != expected.present:
            return expected
        values = full_vector(expected.table, expected.present, moment.snapshot.values)
        with np.errstate(invalid="ignore"):
            far = norms(expected.table, values - expected.values) > expected.tolerances + reference.noise_limit * expected.scales
        if far.any():
            return expected
    return None


def trace_of(  # noqa: PLR0913 - the training, and the changes in one run
    task: Task,
    *,
    seed: int,
    model: nn.Module | None = None,
    batches: Sequence[Any] | None = None,
    spread: Callable[[nn.Module], tuple[nn.Module, Task]] | None = None,
    part: Part = WHOLE,
) -> UserTrace:
    """Train on one device, and return the trace.

    `spread` gets the model, and returns the module to call and the task to train. None leaves both unchanged. Exceptions from
    the user's code get a note about the single-device run.
    """
    try:
        module = build_model(task) if model is None else model
        called, trained = (module, task) if spread is None else spread(module)
        given = [convert_batch(batch, task.dtype) for batch in (task.batches if batches is None else batches)]
        with seed_generators(seed):
            return train(trained, Reader(TensorNames(module), called), given, task.step, 1.0, part)
    except UsageError:
        raise
    except Exception as error:
        error.add_note(note_on(error, task.dtype))
        raise


def perturbed_start(task: Task, number: int, eps: float) -> dict[str, Any]:
    """Return a model and batches in which each value is changed at random, by up to one unit in the last place.

    `number` is the copy's number, from which the random generator is seeded.
    """
    generator = np.random.default_rng((task.seed, number))
    model = perturbed_model(task, eps, generator)
    batches = [perturb_batch(convert_batch(batch, task.dtype), eps, generator) for batch in task.batches]
    return {"model": model, "batches": batches}


def perturbed_model(task: Task, eps: float, generator: np.random.Generator) -> nn.Module:
    """Build the user's model, with each parameter changed at random by up to one unit in the last place."""
    model = build_model(task)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.mul_(perturbation_factors(parameter, eps, generator))
    return model


def _same_model_twice(task: Task) -> tuple[nn.Module, nn.Module]:
    """Build two models. Raises `UsageError` if they differ or share modules."""
    first, second = build_model(task), build_model(task)
    expected = "a function that builds a new model with equal values; torch, numpy and random are seeded before each call"
    if {id(module) for module in first.modules()} & {id(module) for module in second.modules()}:
        raise invalid("model", "two calls return the same module, or share submodules", expected)
    before, after = (dict([*model.named_parameters(), *model.named_buffers()]) for model in (first, second))
    differing = [name for name in before | after if not _equal(before.get(name), after.get(name))]
    if differing:
        raise invalid("model", f"{differing[0]} differs between two calls", expected)
    return first, second


def _equal(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None or first.dtype != second.dtype or first.shape != second.shape:
        return False
    return bool(torch.isclose(first.detach(), second.detach(), rtol=0.0, atol=0.0, equal_nan=True).all())


def _require_same_training(model: nn.Module, first: Trace, second: Trace) -> None:
    """Raise `UsageError` if two runs that differ only in random state are not bitwise equal."""
    expected = "values that depend only on the model, the batch and the optimizer. Leave out times and random numbers"
    if any(step.reported for step in first.steps) != any(step.reported for step in second.steps):
        raise invalid(
            "the result from `step` or `also`", "of two runs on one device, only one returned values to compare", expected
        )
    for one, other in zip(moments(first), moments(second), strict=True):
        if one.snapshot.present != other.snapshot.present or not np.array_equal(
            one.snapshot.values, other.snapshot.values, equal_nan=True
        ):
            if one.phase is Phase.REPORTED:
                name = _first_differing(one.snapshot, other.snapshot)
                why = f"two runs on one device differ at step {one.step} in {name!r}"
                raise invalid("the result from `step` or `also`", why, expected)
            raise invalid(
                "the training",
                f"two runs on one device differ at step {one.step} ({one.phase.value}), probably because the training draws "
                "random numbers"
                f"{_drawn_by(model)}",
                "a training without random numbers, because each rank would draw different numbers. Use dropout_masks=True for "
                "dropout modules, set p=0, call eval(), or put masks into the batches",
            )


def _first_differing(first: Snapshot, second: Snapshot) -> str:
    """Name of the first value that differs between two snapshots."""
    one, other = (_values_by_name(each) for each in (first, second))
    names = dict.fromkeys([*one, *other])
    return next(
        name
        for name in names
        if name not in one or name not in other or not np.array_equal(one[name], other[name], equal_nan=True)
    )


def _values_by_name(snapshot: Snapshot) -> dict[str, Numbers]:
    ends = np.cumsum([piece.numel for piece in snapshot.pieces])
    return {piece.name: snapshot.values[end - piece.numel : end] for piece, end in zip(snapshot.pieces, ends, strict=True)}


def _drawn_by(model: nn.Module) -> str:
    """Name active dropout modules: `` (by Dropout '1', p=0.5, and 2 more)``; empty if there are none."""
    found = [f"{type(module).__name__} {name!r}, p={_rate(module):g}" for name, module in model.named_modules() if _rate(module)]
    return f" (by {found[0]}{f', and {len(found) - 1} more' if found[1:] else ''})" if found else ""


def _rate(module: nn.Module) -> float:
    """Active dropout rate, also inside attention and recurrent modules; 0 if masks replace it."""
    if isinstance(module.forward, Masked):
        return 0
    rate = getattr(module, "p" if isinstance(module, DROPOUT) else "dropout", 0)
    return rate if module.training and isinstance(rate, (int, float)) else 0


class _Precision(TorchFunctionMode):
    """Records element types in results that require gradients, because some models compute in lower precision inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, torch.Tensor) and result.requires_grad and result.is_floating_point() and result.numel():
            self.seen.add(result.dtype)
        return result


def coarsest_type(kinds: Iterable[torch.dtype]) -> torch.dtype:
    """Return the element type with the largest machine epsilon; float64 if there is no type."""
    return max(kinds, key=eps_of, default=torch.float64)


def eps_of(kind: torch.dtype) -> float:
    """Return the machine epsilon of a floating-point type."""
    return float(torch.finfo(kind).eps)
