"""Accumulated gradients, clipping, settings, skipped updates, and updates without an optimizer of torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import equivcheck
from equivcheck import Outcome
from equivcheck.recording.trace import Clip, Moment, RecordedStep
from equivcheck.recording.trace_file import read_trace
from equivcheck.recording.watch.record import record

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def batch(number: int) -> torch.Tensor:
    """Random rows."""
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(number))


def recorded(folder: Path, train: Callable[[nn.Module], object], **options: Any) -> tuple[RecordedStep, ...]:
    """Steps of a training with a linear."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    with record(folder, **options):
        train(model)
    (trace,) = read_trace(folder)
    return trace.steps


def moments(step: RecordedStep) -> set[Moment]:
    """Moments with tensors."""
    return {entry.moment for entry in step.entries}


def accumulated(step: RecordedStep) -> dict[int, dict[str, float]]:
    """First signed sum of each accumulated gradient."""
    found: dict[int, dict[str, float]] = {}
    for entry in step.entries:
        if entry.moment is Moment.ACCUMULATED:
            found.setdefault(entry.microbatch, {})[entry.piece.name] = float(entry.sketch.sums[0])
    return found


def sums(step: RecordedStep, moment: Moment) -> dict[str, float]:
    """First signed sum of each tensor at a moment."""
    return {entry.piece.name: float(entry.sketch.sums[0]) for entry in step.entries if entry.moment is moment}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_before_each_microbatch_are_read(tmp_path: Path, set_to_none: bool) -> None:
    """Up to the eighth; before the first one there are none."""

    def train(model: nn.Module, count: int = 10, steps: int = 2) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(steps):
            optimizer.zero_grad(set_to_none=set_to_none)
            for number in range(count - step):
                model(batch(number)).square().sum().backward()
            optimizer.step()

    for number, step in enumerate(recorded(tmp_path / "ten", train)):
        assert list(accumulated(step)) == list(range(1, 9))
        assert step.num_backwards == 10 - number
    for count in (1, 3, 8):
        expected = recorded(tmp_path / f"{count}", lambda model, count=count: train(model, count, 1))[0]  # type: ignore[misc]
        ten = read_trace(tmp_path / "ten")[0].steps[0]
        assert accumulated(ten)[count] == sums(expected, Moment.GRADIENT)


def test_gradients_that_are_left_over_are_read_before_the_first_microbatch(tmp_path: Path) -> None:
    """They show that `zero_grad` is missing."""

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            model(batch(number)).square().sum().backward()
            optimizer.step()

    first, second = recorded(tmp_path, train)
    assert accumulated(first) == {}
    assert accumulated(second) == {0: sums(first, Moment.GRADIENT)}


def test_a_repeated_backward_pass_is_no_microbatch(tmp_path: Path) -> None:
    """Gradients before the next microbatch have both."""

    def train(model: nn.Module, parts: int = 2) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(parts):
            scores = model(batch(number))
            scores.square().sum().backward(retain_graph=True)
            scores.sum().backward()
        optimizer.step()

    expected = recorded(tmp_path / "one", lambda model: train(model, 1))[0]
    (found,) = recorded(tmp_path / "two", train)
    assert (found.num_backwards, len(found.losses)) == (2, 4)
    assert accumulated(found) == {1: sums(expected, Moment.GRADIENT)}


def clip_once(model: nn.Module) -> list[float]:
    """Clip by one call."""
    return [float(nn.utils.clip_grad_norm_(model.parameters(), 0.25, norm_type=3.0))]


def clip_in_parts(model: nn.Module) -> list[float]:
    """Clip by two calls, as a pipeline does after it has reduced the norm."""
    norm = nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None], norm_type=3.0)
    nn.utils.clip_grads_with_norm_(parameters=model.parameters(), max_norm=0.25, total_norm=norm)
    return [float(norm)]


def clip_each(model: nn.Module) -> list[float]:
    """Clip each parameter by its own norm."""
    return [float(nn.utils.clip_grad_norm_(each, 0.25, 3.0)) for each in model.parameters()]


@pytest.mark.parametrize("clip", [clip_once, clip_in_parts, clip_each])
def test_norms_are_those_that_the_script_gets(tmp_path: Path, clip: Callable[[nn.Module], list[float]]) -> None:
    """With limit and norm type; gradients are read before."""
    norms = []

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            optimizer.zero_grad()
            model(batch(number)).square().sum().backward()
            norms.append(clip(model))
            optimizer.step()

    steps = recorded(tmp_path, train)
    expected = [tuple(Clip(norm=norm, max_norm=0.25, norm_type=3.0) for norm in own) for own in norms]
    assert [step.clips for step in steps] == expected
    for step in steps:
        before, after = sums(step, Moment.UNCLIPPED), sums(step, Moment.GRADIENT)
        assert before.keys() == after.keys() == {"weight", "bias"}
        assert abs(after["weight"]) < abs(before["weight"])


def test_settings_of_each_group_are_text(tmp_path: Path) -> None:
    """Numbers have the same text as Python's, wherever they come from."""

    def train(model: nn.Linear) -> None:
        groups = [{"params": [model.weight], "lr": np.float64(0.5), "extra": object()}, {"params": [model.bias]}]
        optimizer = torch.optim.Adam(groups, lr=torch.tensor(0.125), betas=(0.8, 0.9), weight_decay=0.25)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        for number in range(2):
            model(batch(number)).square().sum().backward()
            optimizer.step()
            scheduler.step()

    first, second = recorded(tmp_path, train)  # type: ignore[arg-type]
    assert [each["lr"] for each in first.settings] == ["0.5", "0.125"]
    assert [each["lr"] for each in second.settings] == ["0.25", "0.0625"]
    common = {"optimizer": "Adam", "betas": "(0.8, 0.9)", "weight_decay": "0.25", "amsgrad": "False", "foreach": "None"}
    for group in first.settings:
        assert common.items() <= group.items()
        assert not {"params", "extra"} & set(group)


class Scaled:
    """A training with a `GradScaler`; step 1 has infinite gradients."""

    def __init__(self, *, fused: bool, clips: bool = False, bad: tuple[int, ...] = (1,)) -> None:
        self.fused, self.clips, self.bad = fused, clips, bad

    def __call__(self, model: nn.Module) -> None:
        """Train three steps."""
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=self.fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for number in range(3):
            optimizer.zero_grad()
            loss = model(batch(number) * (math.inf if number in self.bad else 1.0)).square().sum()
            scaler.scale(loss).backward()
            if self.clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_update_is_a_step_without_gradients(tmp_path: Path, fused: bool, clips: bool) -> None:
    """So two runs that skip the same steps are equal; other gradients are those before scaling."""
    scaled = Scaled(fused=fused, clips=clips)
    steps = recorded(tmp_path / "one", scaled)
    assert [step.num_skipped for step in steps] == [0, 1, 0]
    assert not moments(steps[1]) & {Moment.GRADIENT, Moment.UNCLIPPED}
    assert sums(steps[1], Moment.UPDATE) == sums(steps[0], Moment.UPDATE)

    def plain(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model(batch(0)).square().sum().backward()
        optimizer.step()

    if not clips:
        assert sums(steps[0], Moment.GRADIENT) == pytest.approx(sums(recorded(tmp_path / "plain", plain)[0], Moment.GRADIENT))
    recorded(tmp_path / "same", scaled)
    assert equivcheck.compare(tmp_path / "one", tmp_path / "same").outcome is Outcome.EQUIVALENT
    recorded(tmp_path / "other", Scaled(fused=fused, clips=clips, bad=()))
    assert equivcheck.compare(tmp_path / "one", tmp_path / "other").outcome is not Outcome.EQUIVALENT


def descend(model: nn.Module, steps: int = 3, *, through_data: bool, factor: float = 1.0, parts: int = 2) -> None:
    """Update parameters without an optimizer."""
    for step in range(steps):
        for part in range(parts):
            model(batch(parts * step + part)).square().sum().backward()
        with torch.no_grad():
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for parameter in model.parameters():
                assert parameter.grad is not None
                values = parameter.data if through_data else parameter
                values -= 0.1 * factor * parameter.grad
                parameter.grad = None
    model(batch(0))


@pytest.mark.parametrize("through_data", [False, True])
def test_a_training_without_an_optimizer_is_recorded(tmp_path: Path, through_data: bool) -> None:
    """Gradients are those after clipping, and steps end if parameters have changed."""
    steps = recorded(tmp_path / "one", lambda model: descend(model, through_data=through_data))

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            for part in range(2):
                model(batch(2 * step + part)).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    expected = recorded(tmp_path / "other", train)
    assert [step.step for step in steps] == [0, 1, 2]
    for own, other in zip(steps, expected, strict=True):
        assert own.samples == other.samples
        for moment in (Moment.START, Moment.UNCLIPPED, Moment.GRADIENT, Moment.UPDATE):
            assert sums(own, moment) == pytest.approx(sums(other, moment), rel=1e-5)
    verdict = equivcheck.compare(tmp_path / "one", tmp_path / "other")
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    recorded(tmp_path / "wrong", lambda model: descend(model, through_data=through_data, factor=1.5))
    assert equivcheck.compare(tmp_path / "one", tmp_path / "wrong").outcome is not Outcome.EQUIVALENT


def train_with_sgd(model: nn.Module, steps: int = 4) -> None:
    """Train a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("train", [train_with_sgd, lambda model: descend(model, 4, through_data=True, parts=1)])
def test_later_steps_begin_with_the_parameters_of_the_step_before(tmp_path: Path, train: Callable[[nn.Module], None]) -> None:
    """The same as if all steps were recorded."""
    every = recorded(tmp_path / "every", train)
    late = recorded(tmp_path / "late", train, from_step=2, steps=1)
    assert [step.step for step in late] == [1, 2]
    assert moments(late[0]) == {Moment.UPDATE}
    assert sums(late[0], Moment.UPDATE) == sums(every[1], Moment.UPDATE)
    assert (late[0].samples, late[0].num_backwards, late[0].losses) == ((), 0, ())
    for moment in (Moment.GRADIENT, Moment.UPDATE):
        assert sums(late[1], moment) == sums(every[2], moment)
    assert (late[1].samples, late[1].losses) == (every[2].samples, every[2].losses)
    recorded(tmp_path / "again", train, from_step=2, steps=1)
    assert equivcheck.compare(tmp_path / "late", tmp_path / "again").outcome is Outcome.EQUIVALENT


def test_a_process_that_trains_nothing_is_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a launcher; and an empty folder has a reason otherwise."""
    model = nn.Linear(3, 2)
    with record(tmp_path):
        model(batch(0))
    assert capsys.readouterr().err == ""
    with record(tmp_path):
        model(batch(0)).sum().backward()
    assert capsys.readouterr().err.startswith(f"equivcheck: nothing was recorded in {tmp_path}: backward passes ran, but no ")
    with record(tmp_path, from_step=9):
        train_with_sgd(model)
    assert capsys.readouterr().err == (
        f"equivcheck: nothing was recorded in {tmp_path}: the training took 4 steps, and the first step to record is 9\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, torch.optim.SGD])
def test_closures_make_one_step_each(tmp_path: Path, optimizer: type[torch.optim.Optimizer]) -> None:
    """Gradients are those of the first call; samples are those of all."""

    def train(model: nn.Module) -> None:
        own: Any = optimizer(model.parameters(), lr=0.01)
        for step in range(2):

            def closure(step: int = step) -> torch.Tensor:
                own.zero_grad()
                loss = model(batch(step)).square().sum()
                loss.backward()
                return loss

            own.step(closure)

    steps = recorded(tmp_path, train)
    assert [step.step for step in steps] == [0, 1]
    for step in steps:
        assert len(step.samples) == step.num_backwards == len(step.losses)
        assert len(set(step.samples)) == 1
        assert sums(step, Moment.GRADIENT)
    assert sums(steps[0], Moment.GRADIENT) == sums(recorded(tmp_path / "plain", train_with_sgd)[0], Moment.GRADIENT)


def test_a_step_does_not_end_inside_a_backward_pass(tmp_path: Path) -> None:
    """Optimizers may step inside one that runs forwards again."""

    def train(model: nn.Module) -> None:
        head = nn.Linear(2, 2)
        both = nn.Sequential(model, head)
        for parameter in both.parameters():
            own = torch.optim.SGD([parameter], lr=0.1)

            def update(_: torch.Tensor, own: torch.optim.SGD = own) -> None:
                own.step()
                own.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)
        for number in range(2):
            hidden: Any = checkpoint(model, batch(number), use_reentrant=False)
            head(hidden).square().sum().backward()

    steps = recorded(tmp_path, train)
    assert [step.step for step in steps] == [0, 1]
    for step in steps:
        assert len(sums(step, Moment.GRADIENT)) == 4
        assert (step.num_backwards, len(step.samples)) == (1, 1)
