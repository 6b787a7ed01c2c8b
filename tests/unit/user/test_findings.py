"""Trainings that are wrong, hang, fail, or prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from equivcheck import NotEquivalent, Outcome, check_training
from equivcheck.worlds.trace.differences import Difference, Phase
from support.verdicts import first_divergence
from unit.user.programs import batches, brought, build, in_ddp, said


def reduced(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Data parallelism by hooks, with changed averages."""

    def average(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return change(total / dist.get_world_size())

    for parameter in model.parameters():
        parameter.register_hook(average)
    return model


def on_last(value: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    """Apply a function on the last rank."""
    return changed if dist.get_rank() == dist.get_world_size() - 1 else value


@pytest.mark.parametrize(
    ("parallelize", "phase", "difference"),
    [
        (lambda model, _: None, Phase.GRADIENT, Difference.RANKS_DISAGREE),
        (lambda model, _: reduced(model, lambda average: average * 2), Phase.GRADIENT, Difference.VALUE),
        (lambda model, _: reduced(model, lambda average: average * (1 + 1e-12)), Phase.GRADIENT, Difference.VALUE),
        (lambda model, _: reduced(model, lambda a: on_last(a, a * (1 + 1e-15))), Phase.GRADIENT, Difference.RANKS_DISAGREE),
        (lambda model, _: reduced(model, lambda average: average * float("nan")), Phase.GRADIENT, Difference.NAN),
        (lambda model, _: in_ddp(model.requires_grad_(False)[3].requires_grad_(True) and model, _), None, Difference.MISSING),
        (lambda model, _: in_ddp(model.append(nn.Linear(2, 2, dtype=torch.float64)), _), None, None),
    ],
    ids=["not_reduced", "summed", "slightly_off", "replicas_differ", "nan", "frozen", "extra"],
)
def test_what_is_wrong_is_found(parallelize: Any, phase: Phase | None, difference: Difference | None) -> None:
    """The first divergence has phase and kind. In float64 no error is too small."""
    verdict = check_training(**brought(parallelize=parallelize))
    first = first_divergence(verdict)
    assert phase in (None, first.phase)
    assert difference in (None, first.difference)
    with pytest.raises(NotEquivalent, match="DIVERGED: your training on dp 2"):
        verdict.assert_equivalent()


def test_other_element_types_and_tensors_too_many_are_differences() -> None:
    """Another type, or an extra parameter, is found even if values agree."""

    def extended(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        model.register_parameter("scale", nn.Parameter(torch.ones(1)))
        return reduced(model, lambda average: average)

    first = first_divergence(check_training(**brought(parallelize=extended)))
    assert (first.tensor, first.difference) == ("scale", Difference.EXTRA)


def test_state_and_buffers_are_compared_at_the_end() -> None:
    """Lost state and changed buffers are found even if parameters agree."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.linear(inputs)

    def counting_twice(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        model.register_forward_pre_hook(lambda module, _inputs: module.calls.add_(1) and None)
        return reduced(model, lambda average: average)

    first = first_divergence(check_training(**brought(model=Counted, parallelize=counting_twice)))
    assert (first.phase, first.tensor) == (Phase.BUFFER, "calls")

    def forgetting(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model(batch[0]), batch[1])
        value.backward()
        optimizer.step()
        if dist.is_initialized() and next(iter(optimizer.state.values()))["step"] == 3:
            optimizer.state.clear()
        return value

    first = first_divergence(check_training(**brought(step=forgetting)))
    assert (first.phase, first.difference) == (Phase.STATE, Difference.MISSING)


def test_a_hang_and_a_crash_are_verdicts() -> None:
    """The verdict says where ranks wait or raise, and the next check runs."""

    def hanging(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if mesh.get_rank() == 0:
            dist.barrier()
        return model

    verdict = check_training(**brought(parallelize=hanging))
    assert verdict.outcome is Outcome.HUNG
    assert "barrier" in verdict.describe()

    def failing(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        raise KeyError("no such layer")

    verdict = check_training(**brought(parallelize=failing))
    assert verdict.outcome is Outcome.CRASHED
    assert "ranks 0, 1 raised KeyError\n" in verdict.describe()
    assert "error: 'no such layer'\n" in verdict.describe()
    assert 'raise KeyError("no such layer")' in verdict.describe()
    check_training(**brought()).assert_equivalent()


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_rank_that_runs_for_ever_is_shown_where_it_runs(world: str) -> None:
    """The text ends with the stack of the running rank."""

    def computing_for_ever(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        is_last = mesh.get_rank() == 1
        while is_last:
            pass
        return in_ddp(model, mesh)

    verdict = check_training(**brought(parallelize=computing_for_ever), deadline=0.5, world=world)
    assert verdict.outcome is Outcome.HUNG
    assert "  the run was given up: nothing but computing for 0.5 s of CPU time\n" in verdict.describe()
    assert "rank 1 still runs\n" in verdict.describe()
    assert "in computing_for_ever" in verdict.describe()


def test_tensors_that_are_not_named_are_counted() -> None:
    """The text counts unnamed tensors."""
    layers = 30
    verdict = check_training(
        **brought(
            model=lambda: nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(layers)), nn.Linear(4, 2, bias=False)),
            parallelize=lambda model, _: None,
            batches=batches(steps=1),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )
    )
    beyond = 2 * (layers + 1) - 1 - len(verdict.followers)
    assert verdict.num_unnamed == beyond
    assert f", then {beyond} more tensors" in said(verdict)


def test_no_gradient_is_no_pass() -> None:
    """If every gradient is zero, `assert_equivalent` raises."""
    verdict = check_training(**brought(loss=lambda outputs, targets: (outputs * 0.0).sum()))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    with pytest.raises(NotEquivalent, match=r"all gradients of the single-device run are\s+zero"):
        verdict.assert_equivalent()


def test_noise_is_no_pass() -> None:
    """A training that loses half its digits to rounding proves nothing."""
    verdict = check_training(**brought(loss=lambda outputs, targets: torch.sin((outputs - targets) * 1e12).mean()))
    assert verdict.outcome is Outcome.INCONCLUSIVE


def large_steps(lr: float) -> dict[str, Any]:
    """Arguments with overflowing parameters, or overflowing values computed from them."""
    return brought(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr))


@pytest.mark.parametrize(("lr", "says"), [(1e200, "not finite at step 0 (update)"), (1e90, "; all steps before step 1 agree")])
def test_a_training_that_is_lost_is_no_pass(lr: float, says: str) -> None:
    """The text says that earlier steps agree."""
    verdict = check_training(**large_steps(lr))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.reason.endswith(says)


def test_a_small_fault_before_a_training_is_lost_is_found() -> None:
    """Noise in later steps hides nothing in earlier ones."""
    wrong = {"parallelize": lambda model, _: reduced(model, lambda average: average * (1 + 1e-12))}
    assert first_divergence(check_training(**large_steps(1e90) | wrong)).step == 0


def test_what_is_no_mean_over_rows_is_hinted_at() -> None:
    """Batch statistics differ over parts, and one device confirms it."""
    verdict = check_training(
        **brought(model=lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), parallelize=in_ddp)
    )
    assert verdict.outcome is Outcome.DIVERGED
    assert "not a mean over rows" in said(verdict)
    assert "not a mean over rows" not in said(check_training(**brought(parallelize=lambda model, _: None)))


def test_wrappers_and_ties_keep_names() -> None:
    """Wrappers do not change names, and tied weights have one name."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.last.weight = self.first.weight
            self.head = nn.Linear(4, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.head(self.last(torch.tanh(self.first(inputs))))

    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.inner(inputs)

    def wrapped(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        reduced(model, lambda average: average)
        model.head = Around(model.head)
        return Around(model)

    check_training(**brought(model=Tied, parallelize=wrapped)).assert_equivalent()

    def untied(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        model.last.weight = nn.Parameter(model.last.weight.detach().clone())
        return wrapped(model, mesh)

    verdict = check_training(**brought(model=Tied, parallelize=untied))
    assert verdict.divergence is not None
    assert verdict.divergence.step == 0
    assert "last.weight" in verdict.describe()


def test_the_tally_counts_trainings_of_users() -> None:
    """The pytest summary includes `check_training`."""
    from equivcheck.system.tally import take_counts

    take_counts()
    check_training(**brought(model=build))
    assert take_counts() == {("check_training", "sim", "equivalent"): 1}
