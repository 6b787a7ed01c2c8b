"""Checks the user's evaluation: its loss over all examples must not depend on how they are split into batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from equivcheck.arrangements.arrangement import Arrangement, Kind
from equivcheck.arrangements.format import Format
from equivcheck.batching.usage import invalid
from equivcheck.batching.verdict import ArrangementResult
from equivcheck.errors import UsageError
from equivcheck.oracle.reference.noise import ABSOLUTE, FACTOR, NUM_PERTURBATIONS
from equivcheck.oracle.verdict.description import shorten_to_line
from equivcheck.training.threads import one_thread
from equivcheck.user.batches import convert_batch
from equivcheck.user.randomness import seed_generators
from equivcheck.user.ranks import build_model
from equivcheck.user.reference import eps_of, perturbed_model
from equivcheck.user.task import Task
from equivcheck.worlds.trace.differences import Difference, Divergence, Phase

MEAN_OF_MEANS = "the evaluation averages the batches' results, so a batch with few tokens counts as much as one with many"
Evaluate = Callable[[nn.Module, list[Any]], Any]
_CAUSES: dict[str, Callable[[list[float], list[int]], Any]] = {
    MEAN_OF_MEANS: lambda values, _: np.mean(values),
    "the evaluation weights the batches' results by rows, so a row with few tokens counts as much as one with many": (
        lambda values, sizes: np.average(values, weights=sizes)
    ),
    "the evaluation is that of the last batch only": lambda values, _: values[-1],
}
"""Mistaken ways to combine the results of single batches, given their numbers of rows."""
_CLOSE = 1e-5
"""Relative difference up to which a mean over batches counts as the evaluation. It is larger than rounding in float32."""
_KINDS = (Kind.SPLIT, Kind.BLANK, Kind.PADDED)


def evaluations(
    evaluate: Evaluate, task: Task, given: Format, whole: Arrangement, shown: Sequence[Arrangement]
) -> list[ArrangementResult]:
    """Evaluate the model on each split or padded arrangement in `shown`, and compare the loss with that for the whole batch."""
    with one_thread():
        expected, tolerance = _measured(evaluate, task, _batches(task, given, whole))
        return [
            _evaluated(each, partial(_value, evaluate, task, build_model(task), _batches(task, given, each)), expected, tolerance)
            for each in shown
            if each.kind in _KINDS
        ]


def cause_of_evaluation(evaluate: Evaluate, task: Task, given: Format, shown: Sequence[Arrangement]) -> str:
    """Return why `evaluate` gives other losses if the same examples are split in other ways. Empty if this is unknown."""
    split = [each for each in shown if len(each.microbatches) > 1 and each.kind in _KINDS and not each.has_blank]
    left = dict(_CAUSES) if split else {}
    with one_thread():
        for each in split:
            batches, model = _batches(task, given, each), build_model(task)
            single = [_value(evaluate, task, model, [batch]) for batch in batches]
            actual, sizes = _value(evaluate, task, model, batches), [len(rows.rows) for rows in each.microbatches]
            found = {cause: combine(single, sizes) for cause, combine in left.items()}
            left = {cause: left[cause] for cause, value in found.items() if np.isclose(value, actual, rtol=_CLOSE, atol=0.0)}
    return next(iter(left), "")


def _evaluated(arrangement: Arrangement, evaluated: Callable[[], float], expected: float, tolerance: float) -> ArrangementResult:
    name = f"evaluation, {arrangement.name}"
    try:
        actual = evaluated()
    except UsageError:
        raise
    except Exception as raised:
        failure = shorten_to_line(f"{type(raised).__name__}: {raised}")
        return ArrangementResult(name=name, kind=arrangement.kind, error=math.inf, failure=failure)
    distance = abs(actual - expected)
    error = 0.0
    if distance:
        error = distance / tolerance if np.isfinite(distance) and tolerance else math.inf
    result = ArrangementResult(name=name, kind=arrangement.kind, error=error)
    if error <= 1.0:
        return result
    divergence = Divergence(
        step=0,
        phase=Phase.LOSS,
        tensor="loss",
        difference=Difference.VALUE if np.isfinite(distance) else Difference.NAN,
        rank=-1,
        expected=repr(expected),
        actual=repr(actual),
        error=error,
    )
    ratio = actual / expected if expected else math.inf
    return replace(result, divergence=divergence, ratio=ratio)


def _measured(evaluate: Evaluate, task: Task, batches: list[Any]) -> tuple[float, float]:
    """Return the loss over the whole batch, and its tolerance, measured with perturbed parameters."""
    model = build_model(task)
    types = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    eps = max(map(eps_of, types), default=eps_of(torch.float64))
    expected = _value(evaluate, task, model, batches)
    moved = []
    for number in range(NUM_PERTURBATIONS):
        generator = np.random.default_rng((task.seed, number))
        moved.append(_value(evaluate, task, perturbed_model(task, eps, generator), batches))
    spread = max(abs(value - expected) for value in moved)
    return expected, FACTOR * max(spread, eps * abs(expected)) + ABSOLUTE * eps * abs(expected)


def _batches(task: Task, given: Format, arrangement: Arrangement) -> list[Any]:
    return [convert_batch(given.microbatch(rows), task.dtype) for rows in arrangement.microbatches]


def _value(evaluate: Evaluate, task: Task, model: nn.Module, batches: list[Any]) -> float:
    model.eval()
    with seed_generators(task.seed), torch.no_grad():
        found = evaluate(model, batches)
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        return float(found)
    if not isinstance(found, (int, float)):
        raise invalid("evaluate", f"it returned {found!r:.100}", "the loss as a number")
    return float(found)
