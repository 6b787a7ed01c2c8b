"""The verdict contains the type checker's objection, or that it accepts the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from equivcheck import Outcome, check_training
from equivcheck.user.diagnosis.typed import ACCEPTS
from equivcheck.user.verdict import UserVerdict

spmd = pytest.importorskip("spmd_types")
Summed = Callable[[torch.Tensor, Any], torch.Tensor]
"""Sum the ranks' partial sums in a group."""
CUTS = {"up": ((0, "tp"),), "down": ((1, "tp"),)}


class Perceptron(nn.Module):
    """Two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 3))
        self.down = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Forward on one device."""
        return functional.linear(torch.tanh(functional.linear(x, self.up)), self.down)


def typed_parts(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard columns and rows, with types."""
    return parts(model, mesh, lambda part: spmd.assert_type(part, {mesh.get_group(): spmd.V}))


def parts(model: nn.Module, mesh: DeviceMesh, typed: Callable[[nn.Parameter], nn.Parameter] = lambda part: part) -> nn.Module:
    """Shard columns and rows, without types."""
    for name, ((dim, _),) in CUTS.items():
        part = model.get_parameter(name).detach().chunk(mesh.size(), dim)[mesh.get_local_rank()]
        setattr(model, name, typed(nn.Parameter(part.clone())))
    model.group = mesh.get_group()
    return model


def stepping(summed: Summed) -> Callable[..., torch.Tensor]:
    """A rank's step that combines partial outputs in some way."""

    def step(model: Any, batch: Any, optimizer: torch.optim.Optimizer, loss: Callable[..., torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        part = functional.linear(torch.tanh(functional.linear(batch[0], model.up)), model.down)
        found = loss(summed(part, model.group), batch[1])
        found.backward()
        optimizer.step()
        return found

    return step


def checked(summed: Summed, parallelize: Any = typed_parts, *, explain: bool = True) -> UserVerdict:
    """The verdict on two ranks."""
    return check_training(
        model=Perceptron,
        parallelize=parallelize,
        mesh={"tp": 2},
        batches=[(torch.randn(5, 3), torch.randn(5, 2))],
        loss=functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        step=alone,
        rank_step=stepping(summed),
        cuts=CUTS,
        explain=explain,
    )


def last_rank_fails(part: torch.Tensor, group: Any) -> torch.Tensor:
    """Raise on the last rank while the other waits."""
    if group.rank() == group.size() - 1:
        raise ValueError("no more")
    return spmd.all_reduce(part, group, src=spmd.V, dst=spmd.I)


def alone(model: Any, batch: Any, optimizer: torch.optim.Optimizer, loss: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The single-device step."""
    optimizer.zero_grad()
    found = loss(model(batch[0]), batch[1])
    found.backward()
    optimizer.step()
    return found


def test_what_is_right_needs_no_opinion() -> None:
    """The checker runs only if ranks diverge or fail."""
    verdict = checked(lambda part, group: spmd.all_reduce(part, group, src=spmd.V, dst=spmd.I))
    verdict.assert_equivalent()
    assert not verdict.types


def test_the_operation_whose_types_do_not_fit_is_named() -> None:
    """The checker rejects backward if gradients would be summed twice."""
    verdict = checked(lambda part, group: spmd.all_reduce(part, group, src=spmd.V, dst=spmd.R))
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.types.startswith("spmd_types rejects `found.backward()` (test_typed.py:")
    assert f"types: {verdict.types}" in " ".join(verdict.describe().split())


def test_numbers_are_no_matter_of_types() -> None:
    """A mean instead of a sum has the same types, so the checker accepts it."""
    verdict = checked(lambda part, group: spmd.all_reduce(part, group, src=spmd.V, dst=spmd.I) / 2)
    assert verdict.types == ACCEPTS


@pytest.mark.parametrize("explain", [False, True])
def test_ranks_that_fail_are_asked_about_as_well(explain: bool) -> None:
    """The checker needs no other rank. It is skipped without `explain`."""
    assert bool(checked(last_rank_fails, explain=explain).types) is explain


def test_parameters_without_types_have_no_opinion() -> None:
    """The checker is skipped because it rejects any mix with untyped parameters."""
    verdict = checked(lambda part, _group: part, parallelize=parts)
    assert verdict.outcome is Outcome.DIVERGED
    assert not verdict.types
