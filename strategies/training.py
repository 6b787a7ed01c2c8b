"""Whole trainings."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.scenario import Data, Group, Loss, Model, Optimizer, Precision, Schedule, Training, ZeroGrad
from equivcheck.scenario.clipping import Clipping
from equivcheck.strategies.chance import SEEDS, SOMETIMES
from equivcheck.strategies.clipping import clippings
from equivcheck.strategies.data import data
from equivcheck.strategies.group import groups
from equivcheck.strategies.model import models
from equivcheck.strategies.optimizer import optimizers
from equivcheck.strategies.schedule import schedules

STEPS: SearchStrategy[int] = st.sampled_from((1, 2, 3, 3, 4, 5))
"""More often than not 3 and more: some faults show only once optimizer state matters."""
LOSSES: SearchStrategy[Loss] = st.sampled_from(Loss)
PRECISIONS: SearchStrategy[Precision] = st.sampled_from((Precision.FLOAT64,) * 3 + (Precision.FLOAT32,))
STEEP = 1024
"""How much smaller the learning rate is where a square error is summed (over, say, 64 rows of 16 outputs) or ascended."""

_MODELS = models()
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
    models: SearchStrategy[Model] = _MODELS,
    data: SearchStrategy[Data] = _DATA,
    optimizers: SearchStrategy[Optimizer] = _OPTIMIZERS,
    losses: SearchStrategy[Loss] = LOSSES,
    groups: SearchStrategy[Group] = _GROUPS,
    schedules: SearchStrategy[Schedule | None] = _SCHEDULES,
    clippings: SearchStrategy[Clipping | None] = _CLIPPINGS,
    precisions: SearchStrategy[Precision] = PRECISIONS,
    steps: SearchStrategy[int] = STEPS,
) -> Training:
    """Trainings, most of several steps; for a training that a layout can run, draw from `scenarios`."""
    num_steps, model, batches, optimizer = draw(steps), draw(models), draw(data), draw(optimizers)
    if not optimizer.takes_vectors:
        model = replace(model, layers=tuple(replace(layer, bias=False, norm=None) for layer in model.layers))
    chosen = tuple(draw(groups) for _ in range(draw(_NUM_GROUPS)))
    if not optimizer.decays:
        chosen = tuple(replace(group, weight_decay=0.0) for group in chosen)
    loss = draw(losses)
    return Training(
        model=model,
        data=batches,
        optimizer=tamed(optimizer, loss),
        loss=loss,
        groups=chosen,
        schedule=draw(schedules),
        clipping=draw(clippings),
        zero_grad=ZeroGrad.ZERO if draw(SOMETIMES) else ZeroGrad.NONE,
        precision=draw(precisions),
        steps=num_steps,
        seed=draw(SEEDS),
    )


def tamed(optimizer: Optimizer, loss: Loss) -> Optimizer:
    """The optimizer at a rate at which a few steps of a deep model do not overflow, as they would then prove nothing."""
    if loss is Loss.MSE_SUM or (loss is Loss.MSE_MEAN and optimizer.maximize):
        return replace(optimizer, lr=optimizer.lr / STEEP)
    return optimizer
