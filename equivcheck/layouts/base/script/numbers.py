"""Parameters and data in a script: literals from the scenario, or values drawn by torch from a seed."""

from __future__ import annotations

import numpy as np
import torch

from equivcheck.layouts.base.limits.repairs import has_ties
from equivcheck.layouts.base.script.form import Form
from equivcheck.layouts.base.script.text import tuple_code
from equivcheck.scenario import CrossEntropy, Training
from equivcheck.system.choice import PrintableEnum
from equivcheck.training.material import Batch, material


class Numbers(PrintableEnum):
    """How the script gets its parameters and data: written out as literals, or drawn from a seed."""

    EXACT = "exact"
    DRAWN = "drawn"


MOST_LITERALS = 120
"""Maximum number of literals in a script. A script with more draws its values from a seed."""


def choose_numbers(training: Training) -> Numbers:
    """Choose how the script gets weights and data: as literals if there are at most `MOST_LITERALS`, else drawn from a seed.

    Only literals give the exact values of the finding. Losses on labels always use literals.
    """
    if isinstance(training.loss, CrossEntropy):
        return Numbers.EXACT
    return Numbers.EXACT if count_numbers(training) <= MOST_LITERALS else Numbers.DRAWN


def count_numbers(training: Training) -> int:
    """Count the numbers in the initial parameters and the data."""
    drawn = material(training)
    tensors = [*drawn.parameters.values()]
    for step in drawn.steps:
        tensors += [tensor for batch in step for tensor in _tensors(batch)]
    return sum(tensor.numel() for tensor in tensors)


def constants(training: Training, form: Form, numbers: Numbers) -> list[str]:
    """Return lines to define the data, and the parameters if they are literals."""
    return _drawn(training) if numbers is Numbers.DRAWN else _literals(training, form)


def initial_lines(training: Training, numbers: Numbers) -> list[str]:
    """Return lines to load the initial parameters into the model."""
    if numbers is Numbers.DRAWN:
        return []
    model = training.model
    others = model.counter or model.offset or model.has_router_bias or has_ties(model)
    values = "{name: torch.tensor(values) for name, values in PARAMETERS.items()}"
    return [f"model.load_state_dict({values}{', strict=False' * others})"]


def _literals(training: Training, form: Form) -> list[str]:
    drawn = material(training)
    parameters = [f'"{form.name_of(name)}": {_nested(values.numpy())}' for name, values in drawn.parameters.items()]
    steps = [[tuple_code([_nested(tensor.numpy()) for tensor in _tensors(batch)]) for batch in step] for step in drawn.steps]
    several = len(training.data.microbatches) > 1
    batches = [f"[{', '.join(step)}]" if several else step[0] for step in steps]
    return [
        f"PARAMETERS = {{{', '.join(parameters)}}}",
        f"# Per step{' and microbatch' * several}: {_words(training)}.",
        f"BATCHES = [{', '.join(batches)}]",
        *_counted(training),
    ]


def _counted(training: Training) -> list[str]:
    """Write the divisor of a label loss for each step."""
    if not isinstance(training.loss, CrossEntropy) or training.loss.summed:
        return []
    weights = ", weighted by class" * training.loss.class_weights
    weights += ", each with its weight" * (training.loss.weighs_labels or training.model.predicts_two)
    counted = ", ".join(repr(step[0].divisor) for step in material(training).steps)
    return [f"COUNTED = [{counted}]  # labels in each step{weights}"]


def _drawn(training: Training) -> list[str]:
    model, rows = training.model, training.data.microbatches
    inputs = f"torch.randn({_shape(training, str(model.features))})"
    if model.source is not None:
        inputs = f"torch.randint({model.source.vocabulary}, ({_shape(training)}))"
    length = "" if model.length is None else f"{model.length}, "
    masks = [
        f"(torch.rand({{rows}}, {length}{width}) >= {layer.dropout}) / {1 - layer.dropout}"
        for layer, width in zip(model.layers, model.widths[1:], strict=True)
        if layer.dropout
    ]
    batch = tuple_code([inputs, f"torch.randn({_shape(training, *map(str, model.output_shape))})", *masks])
    if len(rows) == 1:
        items = batch.format(rows=rows[0])
    else:
        items = f"[{batch.format(rows='rows')} for rows in {tuple_code(list(map(str, rows)))}]"
    lines = [
        f"torch.manual_seed({training.seed})",
        f"BATCHES = [{items} for _ in range({training.steps})]  # {_words(training)}",
    ]
    if training.has_trailing_window:
        lines.append(f"BATCHES[-1] = BATCHES[-1][:{training.data.last_window}]  # a trailing accumulation window")
    return lines


def _shape(training: Training, *last: str) -> str:
    """Return code for a shape: ``{rows}``, positions and further dims in their order."""
    length = () if training.model.length is None else (str(training.model.length),)
    dims = ["{rows}", *length, *last]
    return ", ".join([dims[1], dims[0], *dims[2:]] if training.data.batch_dim else dims)


def _words(training: Training) -> str:
    masked = any(layer.dropout for layer in training.model.layers)
    return "inputs, targets" + ", dropout masks" * masked


def _tensors(batch: Batch) -> list[torch.Tensor]:
    return [batch.inputs, batch.targets, *(mask for mask in batch.masks if mask is not None)]


def _nested(values: np.ndarray[tuple[int, ...], np.dtype[np.floating]]) -> str:
    """Return code for nested lists whose numbers read back exactly."""
    if values.ndim:
        return f"[{', '.join(map(_nested, values))}]"
    # The shortest text that reads back exactly in the element type. A float32 needs half as many digits.
    return str(values[()])
