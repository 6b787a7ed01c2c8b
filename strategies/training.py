"""Strategies for trainings, and for their parts other than the model and the optimizer."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.layouts.base.limits.repairs import with_stable_lr
from equivcheck.scenario import (
    ClipNorm,
    ClipValue,
    CosineAnnealingLR,
    CrossEntropy,
    Data,
    ExponentialLR,
    Head,
    LinearLR,
    Loss,
    Model,
    NormType,
    Optimizer,
    ParameterGroup,
    ParameterSelection,
    Precision,
    Schedule,
    StepLR,
    Training,
    ZeroGrad,
)
from equivcheck.scenario.clipping import Clipping
from equivcheck.scenario.data import MAX_MICROBATCHES
from equivcheck.strategies.chance import EVENLY, MOSTLY, RARELY, SEEDS, SOMETIMES
from equivcheck.strategies.model import models
from equivcheck.strategies.optimizer import optimizers
from equivcheck.strategies.token_model import cross_entropies, token_models

STEPS: SearchStrategy[int] = st.sampled_from((1, 2, 3, 3, 3, 4, 5))
"""Number of steps, usually 3 or more, because some faults show only once optimizer state matters.
`Training.steps` has the allowed range."""
LOSSES: SearchStrategy[Loss] = st.sampled_from(Loss)
PRECISIONS: SearchStrategy[Precision] = st.sampled_from((Precision.FLOAT64,) * 3 + (Precision.FLOAT32,))
ROWS: SearchStrategy[int] = st.integers(1, 4)
THRESHOLDS: SearchStrategy[float] = st.sampled_from((0.1, 0.01, 1.0, 100.0))
"""Clipping thresholds, mostly below the gradient norms that occur here, so that clipping is active, also in shrunk examples."""

_BATCH_DIMS = st.sampled_from((0, 0, 0, 1))
_COUNTS = st.sampled_from((1, 1, 2, 2, 3, 4))
_LAST_WINDOWS = st.sampled_from((None, None, None, None, 1, 2))
_SELECTS = st.sampled_from(ParameterSelection)
_LR_FACTORS = st.sampled_from((1.0, 0.5, 2.0))
_DECAYS = st.sampled_from((0.0, 0.1))
_BY_NORM: tuple[NormType | None, ...] = (NormType.TWO, NormType.ONE, NormType.INF)
_CLIPPING_KINDS = st.sampled_from((*_BY_NORM, None))
_SCHEDULE_CHOICES: SearchStrategy[Schedule] = st.sampled_from(
    (
        StepLR(),
        ExponentialLR(),
        LinearLR(),
        CosineAnnealingLR(),
        StepLR(step_size=2),
        ExponentialLR(gamma=0.9),
        LinearLR(start_factor=0.5, total_iters=2),
        CosineAnnealingLR(T_max=2),
    )
)


@st.composite
def data(draw: DrawFn, *, rows: SearchStrategy[int] = ROWS, max_microbatches: int = MAX_MICROBATCHES) -> Data:
    """Draw data with 1 to `max_microbatches` microbatches of equal or unequal size.

    In a quarter of the draws, rows are dim 1. In some, the last step has fewer microbatches.
    """
    num_microbatches, batch_dim = min(draw(_COUNTS), max_microbatches), draw(_BATCH_DIMS)
    last_window = draw(_LAST_WINDOWS) if num_microbatches > 1 else None
    if last_window is not None and last_window >= num_microbatches:
        last_window = None
    if num_microbatches > 1 and draw(EVENLY):
        microbatches = tuple(draw(rows) for _ in range(num_microbatches))
    else:
        microbatches = (draw(rows),) * num_microbatches
    return Data(microbatches=microbatches, last_window=last_window, batch_dim=batch_dim)


@st.composite
def groups(draw: DrawFn) -> ParameterGroup:
    """Draw parameter groups, half without weight decay. `trainings` drops the decay if the optimizer has no weight decay."""
    return ParameterGroup(select=draw(_SELECTS), lr_factor=draw(_LR_FACTORS), weight_decay=draw(_DECAYS))


@st.composite
def schedules(draw: DrawFn) -> Schedule:
    """Draw schedules that change the learning rate within few steps."""
    return draw(_SCHEDULE_CHOICES)


@st.composite
def clippings(draw: DrawFn, *, thresholds: SearchStrategy[float] = THRESHOLDS) -> Clipping:
    """Draw gradient clipping by norm or by value, with a threshold from `thresholds`."""
    norm_type = draw(_CLIPPING_KINDS)
    if norm_type is None:
        return ClipValue(clip_value=draw(thresholds))
    return ClipNorm(norm_type=norm_type, max_norm=draw(thresholds))


_MODELS = models()
_TOKEN_MODELS = token_models()
_CROSS_ENTROPIES = cross_entropies()
_DATA = data()
_OPTIMIZERS = optimizers()
_GROUPS = groups()
_SCHEDULES: SearchStrategy[Schedule | None] = st.none() | schedules()
_CLIPPINGS: SearchStrategy[Clipping | None] = st.none() | clippings()
_NUM_GROUPS = st.sampled_from((0, 0, 1, 2))


@st.composite
def trainings(  # noqa: PLR0913 - a strategy for each field, all by keyword
    draw: DrawFn,
    *,
    models: SearchStrategy[Model] | None = None,
    tokens: SearchStrategy[bool] = EVENLY,
    data: SearchStrategy[Data] = _DATA,
    optimizers: SearchStrategy[Optimizer] = _OPTIMIZERS,
    losses: SearchStrategy[Loss | CrossEntropy] | None = None,
    groups: SearchStrategy[ParameterGroup] = _GROUPS,
    schedules: SearchStrategy[Schedule | None] = _SCHEDULES,
    clippings: SearchStrategy[Clipping | None] = _CLIPPINGS,
    precisions: SearchStrategy[Precision] = PRECISIONS,
    steps: SearchStrategy[int] = STEPS,
) -> Training:
    """Draw trainings, most with several steps.

    Each argument is the strategy for one part. Use `scenarios` for trainings that fit a layout. `tokens` draws whether the model
    works on sequences; it has no effect if `models` are given. By default, most token models get a loss over labels, other models
    rarely.
    """
    num_steps = draw(steps)
    model = draw(models) if models is not None else draw(_TOKEN_MODELS if draw(tokens) else _MODELS)
    batches, optimizer = draw(data), draw(optimizers)
    if not optimizer.updates_vectors:
        # The optimizer updates only matrices. Experts go too, because their linears share one tensor.
        layers = tuple(layer.without_routing().with_fields(bias=False, norm=None) for layer in model.layers)
        model = replace(model, layers=layers, head=model.head and Head(tied=model.head.tied), scale=False)
    chosen = tuple(draw(groups) for _ in range(draw(_NUM_GROUPS)))
    if not optimizer.decays:
        chosen = tuple(replace(group, weight_decay=0.0) for group in chosen)
    loss = _loss(draw, model, batches) if losses is None else draw(losses)
    return Training(
        model=model,
        data=batches,
        optimizer=with_stable_lr(optimizer, loss),
        loss=loss,
        groups=chosen,
        schedule=draw(schedules),
        clipping=draw(clippings),
        zero_grad=ZeroGrad.ZERO if draw(SOMETIMES) else ZeroGrad.NONE,
        precision=draw(precisions),
        steps=num_steps,
        seed=draw(SEEDS),
    )


def _loss(draw: DrawFn, model: Model, batches: Data) -> Loss | CrossEntropy:
    has_labels = model.out_features > 1 and (model.length is not None or not batches.batch_dim)
    of_labels = draw(MOSTLY if model.source is not None else RARELY)
    return draw(_CROSS_ENTROPIES) if has_labels and of_labels else draw(LOSSES)
