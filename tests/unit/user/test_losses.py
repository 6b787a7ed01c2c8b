"""Losses and other values that `step` returns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel

from equivcheck import Outcome, UsageError, check_training
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.reference import SingleDeviceRun
from equivcheck.worlds.trace.differences import Difference, Phase
from unit.user.programs import brought, sgd_of, task_of


def returning(change: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    """A step that returns a changed loss and is correct otherwise."""

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> Any:
        inputs, targets = batch
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        optimizer.step()
        return change(value.detach())

    return step


def off_by(*errors: float) -> Callable[..., Any]:
    """A step whose loss is off by another error on each rank."""
    return returning(lambda value: value + errors[dist.get_rank()])


right = returning(lambda value: value)


@pytest.mark.parametrize("axis", ["tp", "pp", "ep"])
def test_ranks_with_the_same_rows_must_return_the_same_loss(axis: str) -> None:
    """Opposite errors on two ranks are found, although their mean is right."""
    verdict = check_training(**brought(mesh={axis: 2}, step=right, rank_step=off_by(-0.1, 0.1)))
    found = verdict.divergence
    assert (verdict.outcome, found.phase, found.difference, found.rank) == (
        Outcome.DIVERGED,
        Phase.LOSS,
        Difference.RANKS_DISAGREE,
        1,
    )
    assert float(found.actual) == pytest.approx(float(found.expected) + 0.1)
    assert "rank 0 has" in found.elsewhere
    assert axis in verdict.hint


def test_the_wrong_one_of_four_ranks_is_named() -> None:
    """Data ranks have different losses. Each is compared with the tensor-parallel rank that has the same rows."""
    verdict = check_training(**brought(mesh={"dp": 2, "tp": 2}, step=right, rank_step=off_by(0, 0, 0.1, 0)))
    assert (verdict.divergence.difference, verdict.divergence.rank) == (Difference.RANKS_DISAGREE, 2)
    assert "ranks 2, 3" in verdict.divergence.expected


def test_every_group_with_different_losses_counts() -> None:
    """Ranks 0 and 1 disagree, and so do ranks 2 and 3. All steps name both groups."""
    verdict = check_training(**brought(mesh={"dp": 2, "tp": 2}, step=right, rank_step=off_by(0.1, 0, 0, 0.1)))
    assert (verdict.divergence.rank, "ranks 0, 1" in verdict.divergence.expected) == (0, True)
    assert verdict.followers == tuple(f"step {step} loss loss" for step in (0, 1, 1, 2, 2))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("mesh", "errors", "rank"),
    [
        ({"tp": 2}, (1, 0), 0),
        ({"tp": 2}, (0, 1), 1),
        ({"dp": 2, "tp": 2}, (1, 0, 0, 0), 0),
        ({"dp": 2, "tp": 2}, (1, 0, 0, 1), 0),
    ],
)
def test_a_loss_that_is_not_finite_is_the_wrong_one(
    mesh: dict[str, int], errors: tuple[int, ...], rank: int, value: float
) -> None:
    """The other rank with the same rows has a right loss."""
    rank_step = off_by(*(value if error else 0.0 for error in errors))
    found = check_training(**brought(mesh=mesh, step=right, rank_step=rank_step)).divergence
    assert (found.difference, found.rank, found.actual) == (Difference.RANKS_DISAGREE, rank, repr(value))


def test_ranks_with_the_same_infinite_loss_agree() -> None:
    """Both ranks are wrong in the same way."""
    found = check_training(**brought(mesh={"tp": 2}, step=right, rank_step=off_by(math.inf, math.inf))).divergence
    assert (found.difference, found.ranks, found.actual) == (Difference.VALUE, (0, 1), "inf")


def test_a_wrong_loss_names_its_ranks() -> None:
    """All ranks have the same wrong loss."""
    verdict = check_training(**brought(mesh={"tp": 2}, step=right, rank_step=off_by(0.1, 0.1)))
    assert (verdict.divergence.difference, verdict.divergence.ranks) == (Difference.VALUE, (0, 1))


@pytest.mark.parametrize(
    ("mesh", "rank_step", "options"),
    [
        ({"dp": 2}, off_by(-0.1, 0.1), {}),
        ({"cp": 2}, off_by(-0.1, 0.1), {}),
        ({"tp": 2}, off_by(-0.1, 0.1), {"shard": lambda batch, mesh: batch}),
        ({"pp": 2}, returning(lambda value: value if dist.get_rank() else None), {}),
        ({"dp": 2, "tp": 2}, right, {}),
    ],
    ids=["other_rows", "own_positions", "own_shards", "one_without", "data_and_tensor"],
)
def test_losses_may_differ(mesh: dict[str, int], rank_step: Any, options: dict[str, Any]) -> None:
    """Losses may differ if rows or positions differ or are unknown. A rank may have no loss."""
    check_training(**brought(mesh=mesh, step=right, rank_step=rank_step, **options)).assert_equivalent()


@pytest.mark.usefixtures("with_causes")
def test_the_rank_whose_loss_is_scaled_is_the_cause() -> None:
    """One rank returns half of its loss."""
    halved = returning(lambda value: value / 2 if dist.get_rank() == 3 else value)
    verdict = check_training(**brought(mesh={"dp": 2, "tp": 2}, step=right, rank_step=halved))
    assert verdict.kinds == (Cause.SCALED,)
    assert "0.5 times the loss on rank 3" in verdict.cause
    assert verdict.measures.loss == pytest.approx(verdict.measures.expected_loss, rel=0.5)


def reporting(*, num_tokens: float = 1.0, norm: float = 1.0) -> Callable[..., Any]:
    """A step that returns the loss, a number and a tensor, wrong by factors on the last rank or on all."""

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> dict[str, Any]:
        value = right(model, batch, optimizer, loss)
        is_last = dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1
        gradients = torch.stack([parameter.grad.norm() for parameter in model.parameters()])
        return {"loss": value, "num_tokens": int(4 * (num_tokens if is_last else 1)), "norms": {"all": gradients * norm}}

    return step


def test_every_value_that_a_step_returns_is_compared() -> None:
    """A step may return a dict. Except for the loss, its values must be the same on all ranks."""
    check_training(**brought(step=reporting())).assert_equivalent()

    on_one = check_training(**brought(step=reporting(), rank_step=reporting(num_tokens=2)))
    found = on_one.divergence
    assert (found.phase, found.tensor, found.difference, found.rank) == (
        Phase.REPORTED,
        "num_tokens",
        Difference.RANKS_DISAGREE,
        1,
    )
    assert "num_tokens" in on_one.hint

    on_all = check_training(**brought(step=reporting(), rank_step=reporting(norm=1 + 1e-9)))
    assert (on_all.divergence.phase, on_all.divergence.tensor, on_all.divergence.ranks) == (Phase.REPORTED, "norms.all", (0, 1))


def test_both_sides_must_report_the_same_names() -> None:
    """A value without a counterpart is a mistake in the arguments."""
    with pytest.raises(UsageError, match=r"'norms.all' only on one device"):
        check_training(**brought(step=reporting(), rank_step=right))
    with pytest.raises(UsageError, match="'more' only on ranks"):
        check_training(**brought(also=lambda *_: {"more": 1} if dist.is_initialized() else {}))
    with pytest.raises(UsageError, match="also"):
        check_training(**brought(also=lambda *_: [1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sharded_values_are_compared_in_float64(dtype: torch.dtype) -> None:
    """On ranks the gradient norm and the weights are DTensors in the model's type. A wrong norm is still found."""

    def clipping(factor: float) -> Callable[..., Any]:
        def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> dict[str, Any]:
            optimizer.zero_grad()
            value = loss(model(batch[0]), batch[1])
            value.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            return {"loss": value.detach(), "grad_norm": norm * factor}

        return step

    usual = {
        "parallelize": lambda model, mesh: fully_shard(model, mesh=mesh),
        "also": lambda model, _optimizer: {"weights": model.state_dict()},
        "dtype": dtype,
    }
    check_training(**brought(step=clipping(1.0), **usual)).assert_equivalent()
    found = check_training(**brought(step=clipping(1.0), rank_step=clipping(1.01), **usual)).divergence
    assert (found.phase, found.tensor, found.difference) == (Phase.REPORTED, "grad_norm", Difference.VALUE)


def test_a_rank_may_report_nothing() -> None:
    """One device reports a value at one step, and of the ranks only the first reports it."""
    numbers: dict[int, int] = {}
    models = []  # keeps ids unique

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> Any:
        models.append(model)
        numbers[id(model)] = numbers.get(id(model), 0) + 1
        value = right(model, batch, optimizer, loss)
        reports = numbers[id(model)] == 2 and not (dist.is_initialized() and dist.get_rank())
        return {"loss": value, "x": 1 + dist.is_initialized() * wrong} if reports else value

    wrong = 0
    check_training(**brought(step=step)).assert_equivalent()
    wrong = 1
    found = check_training(**brought(step=step)).divergence
    assert (found.step, found.phase, found.tensor) == (1, Phase.REPORTED, "x")


def test_values_that_differ_between_two_runs_are_named() -> None:
    """A time is another one in each run."""

    def timed(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> dict[str, Any]:
        return {"loss": right(model, batch, optimizer, loss), "rows": 4, "seconds": time.perf_counter()}

    with pytest.raises(UsageError, match="differ at step 0 in 'seconds'"):
        check_training(**brought(step=timed))


def averaging(*, every: bool) -> tuple[Callable[..., Any], dict[int, AveragedModel]]:
    """A step with a moving average of the weights outside the model, and the averages. It may average before the update, too."""
    kept: dict[int, AveragedModel] = {}
    models = []  # keeps ids unique

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> Any:
        inner = getattr(model, "module", model)
        if id(model) not in kept:
            models.append(model)
            kept[id(model)] = AveragedModel(inner)
        if every:
            kept[id(model)].update_parameters(inner)
        value = right(model, batch, optimizer, loss)
        kept[id(model)].update_parameters(inner)
        return value

    return step, kept


def test_state_outside_the_model_is_compared() -> None:
    """`also` compares a moving average after each step. Without it, a note says that nothing compares the average."""
    step, kept = averaging(every=False)
    wrong, kept_wrong = averaging(every=True)

    def also(model: nn.Module, _optimizer: Any) -> dict[str, Any]:
        return {"average": kept[id(model)] if id(model) in kept else kept_wrong[id(model)]}

    check_training(**brought(step=step, also=also)).assert_equivalent()
    found = check_training(**brought(step=step, rank_step=wrong, also=also)).divergence
    assert (found.step, found.phase, found.tensor) == (0, Phase.REPORTED, "n_averaged/average")

    verdict = check_training(**brought(step=step))
    verdict.assert_equivalent()
    assert any("`kept` (AveragedModel)" in note and "also=" in note for note in verdict.notes)
    assert not any("also=" in note for note in check_training(**brought(step=right)).notes)


class Trainer:
    """A class whose step keeps its arguments."""

    def step(self, model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
        """Keep model and optimizer, and train."""
        self.model, self.inner, self.kept = model, model[0], {"optimizer": optimizer}
        return right(model, batch, optimizer, loss)

    def state_dict(self, destination: dict[str, Any]) -> None:
        """A method that needs an argument, unlike torch's."""


def test_model_and_optimizer_that_a_step_keeps_are_not_outside() -> None:
    """They are compared, so no note asks for `also`. Variables without a value, and other methods, are passed over."""
    trainer = Trainer()

    def step(*given: Any) -> Any:
        return later if dist.is_initialized() else trainer.step(*given)

    assert [SingleDeviceRun(task_of(step=each)).outside for each in (trainer.step, step)] == [(), ()]
    later = None


def test_ranks_may_return_no_loss_at_all() -> None:
    """Gradients and updates decide, and a note says so."""
    silent = returning(lambda _value: None)
    verdict = check_training(**brought(step=right, rank_step=silent))
    verdict.assert_equivalent()
    assert any("losses were not compared" in note for note in verdict.notes)

    unreduced = check_training(**brought(step=right, rank_step=silent, parallelize=lambda model, _mesh: model))
    assert unreduced.divergence.phase is Phase.GRADIENT
    assert any("losses were not compared" in note for note in check_training(**brought(step=silent)).notes)


def with_main_grad(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
    """A step whose gradients are moved to `main_grad`, and which updates without the optimizer's step reading `.grad`."""
    inputs, targets = batch
    value = loss(model(inputs), targets)
    value.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.main_grad, parameter.grad = parameter.grad, None
        optimizer.step()
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.main_grad)
    return value.detach()


@pytest.mark.parametrize("one_device", [None, with_main_grad])
def test_updates_decide_without_gradients(one_device: Any) -> None:
    """Gradients that are not in `.grad` cannot be compared. A note says so, and a wrong update is still found."""
    usual = {"optimizer": sgd_of, "step": one_device, "rank_step": with_main_grad}
    verdict = check_training(**brought(**usual))
    verdict.assert_equivalent()
    assert any("gradients were not compared" in note for note in verdict.notes)

    wrong = check_training(**brought(**usual, parallelize=lambda model, _mesh: model))
    assert (wrong.outcome, wrong.divergence.phase) == (Outcome.DIVERGED, Phase.UPDATE)


def test_ranks_that_forget_backward_lack_gradients() -> None:
    """If nothing is updated, missing gradients are the divergence."""

    def forgetful(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> Any:
        optimizer.step()
        return loss(model(batch[0]), batch[1]).detach()

    found = check_training(**brought(step=right, rank_step=forgetful)).divergence
    assert (found.step, found.phase, found.difference) == (0, Phase.GRADIENT, Difference.MISSING)
