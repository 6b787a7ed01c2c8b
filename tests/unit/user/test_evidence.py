"""Trainings whose agreement proves less than it seems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from equivcheck import NotEquivalent, Outcome, check_training
from equivcheck.user.messages.no_update import NO_GRADIENT, NO_RATE, NO_STEP, NO_UPDATE, OTHER_PARAMETERS
from equivcheck.worlds.trace.differences import Phase
from support.verdicts import first_divergence
from unit.user.programs import STEPS, batches, brought, said


def untouched(_model: nn.Module, _mesh: DeviceMesh) -> None:
    """Leave ranks unsynchronized."""


def first_row_everywhere(batch: Any) -> Any:
    """Repeat the first row."""
    return tuple(part[:1].expand_as(part).clone() for part in batch)


def twice_the_same(batch: Any) -> Any:
    """Give both ranks the same rows."""
    return tuple(torch.cat([part[:2], part[:2]]) for part in batch)


@pytest.mark.parametrize("change", [first_row_everywhere, twice_the_same])
@pytest.mark.parametrize("parts", [1, 2])
def test_ranks_with_the_same_rows_prove_nothing_of_reductions(change: Callable[[Any], Any], parts: int) -> None:
    """Unsynchronized ranks agree if all have the same rows, so this is no pass."""
    given = [[change(batch)] * parts for batch in batches()]
    verdict = check_training(**brought(parallelize=untouched, batches=given))
    assert verdict.outcome is Outcome.INCONCLUSIVE, verdict.describe()
    with pytest.raises(NotEquivalent, match=r"(?s)ranks\s+got the same rows .*a missing\s+reduction\s+cannot\s+show"):
        verdict.assert_equivalent()


def test_one_batch_of_several_with_other_rows_is_enough() -> None:
    """One step with different rows can show a missing reduction."""
    given = [*map(first_row_everywhere, batches()), batches()[0]]
    check_training(**brought(batches=given)).assert_equivalent()
    assert check_training(**brought(parallelize=untouched, batches=given)).outcome is Outcome.DIVERGED
    same = [first_row_everywhere(batch) for batch in batches()]
    check_training(**brought(parallelize=untouched, batches=same, mesh={"tp": 2})).assert_equivalent()


def test_what_differs_is_found_though_rows_are_the_same() -> None:
    """A difference is a finding in any case."""

    def doubled(model: nn.Module, _mesh: DeviceMesh) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 2)

    verdict = check_training(**brought(parallelize=doubled, batches=[first_row_everywhere(batch) for batch in batches()]))
    assert verdict.outcome is Outcome.DIVERGED


def test_a_training_that_changes_no_parameter_is_no_pass() -> None:
    """With learning rate zero a wrong update cannot show."""
    verdict = check_training(**brought(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0)))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.reason == f"{NO_UPDATE}: {NO_RATE}"
    warming_up = {"scheduler": lambda optimizer: LambdaLR(optimizer, lambda step: 0.1 * step)}
    check_training(**brought(), **warming_up).assert_equivalent()


def never_updates(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
    """Forget `optimizer.step()`."""
    optimizer.zero_grad()
    value: torch.Tensor = loss(model(batch[0]), batch[1])
    value.backward()
    return value


def of_other_names(named_parameters: list[Any]) -> torch.optim.Optimizer:
    """Copy the parameters instead of using them."""
    return torch.optim.SGD([parameter.detach().clone() for _, parameter in named_parameters], lr=0.1)


def clears_too_late(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
    """Clear gradients after backward."""
    value = never_updates(model, batch, optimizer, loss)
    optimizer.zero_grad()
    optimizer.step()
    return value


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"optimizer": lambda _: torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=0.1)}, OTHER_PARAMETERS),
        ({"optimizer": of_other_names}, OTHER_PARAMETERS),
        ({"step": never_updates}, NO_STEP),
        ({"step": clears_too_late}, NO_GRADIENT),
        ({"optimizer": lambda parameters: torch.optim.SGD(parameters[:1], lr=1e-300)}, ""),
    ],
)
def test_verdict_says_why_no_parameter_changes(changes: dict[str, Any], why: str) -> None:
    """The reason is the first that applies, and only if it does."""
    assert check_training(**brought(**changes)).reason == ": ".join(filter(None, (NO_UPDATE, why)))


def test_one_rank_is_noted() -> None:
    """On one rank the training passes with a note."""
    verdict = check_training(**brought(mesh={"dp": 1}))
    assert verdict.outcome is Outcome.EQUIVALENT
    assert "note: the mesh has one rank" in said(verdict)
    assert "note:" not in check_training(**brought()).describe()


def test_one_step_is_noted() -> None:
    """A single step passes with a note."""
    assert "note: only one step" in said(check_training(**brought(batches=batches(steps=1))))


def after_the_last_step(before: float, after: float, on: int | None = None) -> Callable[[torch.optim.Optimizer], LRScheduler]:
    """A schedule that differs on a rank only after the last step."""

    def rate(step: int) -> float:
        is_other = dist.is_initialized() and on in (None, dist.get_rank())
        return before if step < STEPS else after if is_other else after / 2

    return lambda optimizer: LambdaLR(optimizer, rate)


@pytest.mark.parametrize("on", [None, 1])
def test_a_rate_that_no_step_has_read_yet_is_compared(on: int | None) -> None:
    """A schedule forgotten at the last step shows in the final settings."""
    verdict = check_training(**brought(scheduler=after_the_last_step(1.0, 0.5, on)))
    found = verdict.divergence
    assert found is not None, verdict.describe()
    assert (found.step, found.phase, found.tensor, found.rank) == (STEPS - 1, Phase.STATE, "0.weight/lr", on or 0)
    assert float(found.actual) == 2 * float(found.expected)
    assert verdict.cause == "after the last step, lr is 0.005, not 0.0025, for `0.weight`"


@pytest.mark.parametrize("name", ["weight_decay", "betas"])
def test_every_number_of_every_group_is_compared(name: str) -> None:
    """Each parameter is compared with its own group."""

    def grouped(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.02}], lr=0.01)

    def changing(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = loss(model(batch[0]), batch[1])
        value.backward()
        optimizer.step()
        if next(iter(optimizer.state.values()))["step"] == STEPS:
            optimizer.param_groups[1][name] = {"weight_decay": 0.1, "betas": (0.9, 0.9)}[name]
        return value

    check_training(**brought(optimizer=grouped)).assert_equivalent()
    first = first_divergence(check_training(**brought(optimizer=grouped, rank_step=changing)))
    assert first.tensor == {"weight_decay": "0.bias/weight_decay", "betas": "0.bias/betas[1]"}[name]
