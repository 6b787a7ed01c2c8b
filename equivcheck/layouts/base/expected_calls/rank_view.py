"""One rank as predictions see it: its parameters, and those with a gradient in a step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from equivcheck.layouts.base.expected_calls.communication import Key, Totals, add, group_name
from equivcheck.layouts.base.expected_calls.passes import Passes, Span
from equivcheck.layouts.base.partition import chunk_size
from equivcheck.layouts.base.rounding import ITEM_BYTES
from equivcheck.scenario import FSDP1, Layout, Training, Wrapping
from equivcheck.training.layers.parameters import Parameter, parameters_of, trains_layer
from equivcheck.worlds.trace.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A parameter, with its local shape on one rank."""

    parameter: Parameter
    """The full parameter."""
    shape: tuple[int, ...]
    """Local shape, after the parallelisms applied so far."""
    cut: bool = False
    """Whether tensor parallelism shards the parameter."""
    counts_in_norm: bool = True
    """Whether the rank counts the parameter's gradient in the norm. Only one of the ranks with a copy counts it."""

    @property
    def name(self) -> str:
        """Name of the parameter within its layer, such as ``linear.weight``."""
        return self.parameter.name

    @property
    def layer(self) -> int | None:
        """Index of the owning layer. None for parameters outside layers."""
        return self.parameter.layer

    @property
    def trained(self) -> bool:
        """Whether the parameter requires a gradient."""
        return self.parameter.trained

    @property
    def numel(self) -> int:
        """How many elements the local shard has."""
        return math.prod(self.shape)

    def padded_part(self, dim: int, parts: int) -> int:
        """Number of elements in each shard if `dim` is split into `parts` shards, each padded to the first shard's size."""
        return math.prod((*self.shape[:dim], chunk_size(self.shape[dim], parts), *self.shape[dim + 1 :]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank with its parameters, for predicting its collective calls."""

    training: Training
    """Training whose calls are predicted."""
    layout: Layout
    """Layout whose calls are predicted."""
    coordinate: tuple[int, ...]
    """The rank's index along each mesh axis."""
    held: tuple[Held, ...]
    """Distinct parameters in model order, with their shapes before the predicted parallelism is applied.

    In a pipeline, they are the parameters in the rank's stages.
    """
    spans: tuple[Span, ...]
    """Modules that the rank calls: its pipeline stages, or the whole model."""

    @property
    def item_bytes(self) -> int:
        """Bytes per element in parameters, gradients and activations."""
        return ITEM_BYTES[self.training.precision.value]

    def axes(self, *names: str) -> str:
        """Return the name of the process group over these mesh axes, as in predicted calls."""
        return group_name(names, self.layout.mesh)

    def index(self, name: str) -> int:
        """The rank's index along the axis `name`."""
        return self.coordinate[self.layout.mesh.names.index(name)]

    def of_layer(self, index: int | None) -> tuple[Held, ...]:
        """Parameters of a layer, or parameters outside all layers if `index` is None."""
        return tuple(held for held in self.held if held.layer == index)

    def has_gradient(self, held: Held, step: int) -> bool:
        """Whether a parameter gets a gradient in a step."""
        return held.trained and held.parameter.is_used_at(step)

    def modules(self) -> Iterator[tuple[Span, RankView]]:
        """Yield each module that the rank calls, and a view with only the module's parameters."""
        for span in self.spans:
            held = tuple(held for held in self.held if span.holds(held.parameter))
            yield span, replace(self, held=held, spans=(span,))

    def passes_at(self, step: int) -> Iterator[Passes]:
        """Yield the passes that the rank runs in a step, in no particular order."""
        microbatches, chunks = self.training.microbatches_at(step), self.layout.num_chunks
        rows_of_chunks = dict(zip(microbatches, self.layout.rows_of_forwards(microbatches), strict=True))
        for span in self.spans:
            for microbatch in microbatches:
                own_rows = microbatch // self.layout.num_data_ranks
                yield Passes(step=step, span=span, rows=rows_of_chunks[microbatch], times=chunks, loss_rows=own_rows)
            # Each number of rows has its own schedule, which infers shapes when it first runs.
            for rows in rows_of_chunks.values() if span.infers_shapes and not step else ():
                yield Passes(step=step, span=span, rows=rows, times=1, loss_rows=rows, infers=True)

    def num_backwards(self, step: int) -> int:
        """Return how many backward passes each module runs in a step."""
        return len(self.training.microbatches_at(step)) * self.layout.num_chunks

    def differentiates(self, index: int, step: int) -> bool:
        """Whether a layer's output requires a gradient in a step. Layer -1 stands for the model's input or embedding."""
        return self._differentiates_embedded or any(
            trains_layer(self.training.model, before, step) for before in range(index + 1)
        )

    def is_differentiated(self, index: int, passes: Passes) -> bool:
        """Whether a layer's output requires a gradient in some passes. This depends on the layer and on earlier layers."""
        if passes.infers or passes.differentiates_input:
            return passes.differentiates_input
        return self.differentiates(index, passes.step)

    @property
    def _differentiates_embedded(self) -> bool:
        source = self.training.model.source
        return source is not None and (not source.frozen or self.computes_frozen_gradients(None))

    def computes_frozen_gradients(self, index: int | None) -> bool:
        """Whether backward computes gradients for frozen parameters in a layer.

        None as `index` stands for parameters outside layers. FSDP1 with use_orig_params computes such gradients if the same flat
        parameter also holds a trained parameter.
        """
        views = [fsdp for fsdp in self.layout.of(FSDP1) if fsdp.use_orig_params]
        units = (self.held if fsdp.wrapping is Wrapping.ROOT_ONLY else self.of_layer(index) for fsdp in views)
        return any(held.trained for unit in units for held in unit)


class Ledger:
    """Counts of the collective calls expected in one stage."""

    def __init__(self, stage: Stage = Stage.COMPUTE) -> None:
        self.stage = stage
        self.totals: Totals = {}

    def note(self, step: int, op: str, axes: str, num_bytes: int, num_calls: int = 1) -> None:
        """Add `num_calls` collective calls to the counts. `num_bytes` is the sum over these calls."""
        key: Key = (step, self.stage, op, axes)
        add(self.totals, key, num_calls, num_bytes)


def full_parameters(training: Training) -> tuple[Held, ...]:
    """All distinct parameters with their full shapes, in model order."""
    return tuple(Held(parameter=parameter, shape=parameter.shape) for parameter in parameters_of(training.model))
