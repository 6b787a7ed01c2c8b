"""Tests of trailing accumulation windows on one device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from equivcheck.scenario import CrossEntropy, Data, Layer, Loss, Model, Training
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.material import material

WINDOW = Training(
    model=Model(features=2, layers=(Layer(width=3),)), data=Data(microbatches=(2, 1, 3), last_window=2), steps=3, seed=1
)


def test_only_the_last_step_has_fewer_microbatches() -> None:
    """Rows follow the window at each step."""
    assert [WINDOW.microbatches_at(step) for step in range(3)] == [(2, 1, 3), (2, 1, 3), (2, 1)]
    assert [WINDOW.rows_at(step) for step in range(3)] == [6, 6, 3]
    assert [[batch.rows for batch in step] for step in material(WINDOW).steps] == [[2, 1, 3], [2, 1, 3], [2, 1]]


@pytest.mark.parametrize("changes", [{"steps": 1}, {"data": Data(microbatches=(2, 1), last_window=2)}], ids=repr)
def test_a_window_without_effect_is_not_trailing(changes: dict[str, object]) -> None:
    """A single step, and a window as long as others, have all microbatches."""
    training = replace(WINDOW, **changes)  # type: ignore[arg-type]

    assert not training.has_trailing_window
    assert training.microbatches_at(training.steps - 1) == training.data.microbatches


@pytest.mark.parametrize("loss", [Loss.MSE_MEAN, Loss.MSE_SUM, CrossEntropy()], ids=repr)
def test_a_trailing_window_counts_its_own_rows(loss: Loss | CrossEntropy) -> None:
    """The last step's loss is the loss of its rows in one microbatch."""
    training = replace(WINDOW, loss=loss)
    steps = material(training).steps
    inputs, targets = (torch.cat([getattr(batch, name) for batch in steps[-1]]) for name in ("inputs", "targets"))
    joined = replace(steps[-1][0], inputs=inputs, targets=targets)

    found = train(single_device_setup(training)).steps[-1].loss
    expected = train(single_device_setup(training), [*steps[:-1], [joined]]).steps[-1].loss

    assert found == pytest.approx(expected, rel=1e-12)
