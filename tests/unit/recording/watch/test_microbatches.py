"""A microbatch's samples are the rows that its backward pass went through, and no others."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from equivcheck.recording.trace import Moment, RecordedStep
from equivcheck.recording.trace_file import read_trace
from equivcheck.recording.watch.record import record
from equivcheck.recording.watch.samples import hash_samples

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class Net(nn.Module):
    """Two linears; the second argument is optional."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, width)

    def forward(self, inputs: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Scores with shape (rows, width)."""
        hidden = self.one(inputs) if scale is None else self.one(inputs) * scale
        scores: torch.Tensor = self.two(torch.tanh(hidden))
        return scores


def batch(step: int, rows: int = 4, width: int = 3) -> torch.Tensor:
    """Random rows."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(step))


def hashes(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Expected hashes of samples."""
    found = hash_samples(tensors)
    assert found is not None
    return tuple(int(each) % 2**64 for each in found)


def recorded(folder: Path, train: Callable[[], object], **options: Any) -> tuple[RecordedStep, ...]:
    """Steps of one process."""
    with record(folder, **options):
        train()
    (trace,) = read_trace(folder)
    return trace.steps


def train(
    call: Callable[[nn.Module, int], Sequence[torch.Tensor]], model: nn.Module | None = None, steps: int = 2
) -> Callable[[], None]:
    """A training with `call`, which returns the losses of a step. Each gets a backward pass of its own."""

    def run() -> None:
        own = Net() if model is None else model
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            for loss in call(own, step):
                loss.backward()
            optimizer.step()

    return run


def test_every_microbatch_has_its_samples(tmp_path: Path) -> None:
    """Also the first one."""

    def call(model: nn.Module, step: int) -> list[torch.Tensor]:
        return [model(rows).square().mean() for rows in batch(step).split(2)]

    steps = recorded(tmp_path, train(call))
    assert [step.num_backwards for step in steps] == [2, 2]
    assert [step.samples for step in steps] == [tuple(hashes(part) for part in batch(step).split(2)) for step in range(2)]


def test_keyword_arguments_are_part_of_a_sample(tmp_path: Path) -> None:
    """From the first call on, although torch's global hooks before a call do not get them."""

    def call(model: nn.Module, step: int) -> list[torch.Tensor]:
        return [model(scale=batch(step, width=4), inputs=batch(step)).square().mean()]

    steps = recorded(tmp_path, train(call))
    assert [step.samples for step in steps] == [(hashes(batch(step), batch(step, width=4)),) for step in range(2)]


def test_forwards_without_a_backward_pass_do_not_count(tmp_path: Path) -> None:
    """Such as an evaluation, also one that uses gradients, or the forward that a pipeline runs to learn shapes."""

    def call(model: nn.Module, step: int) -> list[torch.Tensor]:
        model(batch(7))
        torch.autograd.grad(model(batch(6)).sum(), list(model.parameters()))
        with torch.no_grad():
            model(batch(8))
        with torch.inference_mode():
            model(batch(9))
        return [model(batch(step)).square().mean()]

    steps = recorded(tmp_path, train(call))
    assert [step.samples for step in steps] == [(hashes(batch(step)),) for step in range(2)]
    assert [step.num_backwards for step in steps] == [1, 1]


class Checkpointed(nn.Module):
    """Runs its parts again inside backward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.net, self.last, self.use_reentrant = Net(3), Net(), use_reentrant

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Scores with shape (rows, 2)."""
        hidden: Any = checkpoint(self.net, inputs, mask, use_reentrant=self.use_reentrant)
        hidden = checkpoint(self.last, hidden + inputs.sum(), mask, use_reentrant=self.use_reentrant)
        assert isinstance(hidden, torch.Tensor)
        return hidden


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("is_outside", [False, True])
def test_recomputed_forwards_do_not_count(tmp_path: Path, use_reentrant: bool, is_outside: bool) -> None:
    """Neither parts of the model nor, with a checkpoint around it, the model; nested backward passes are no microbatches."""

    def call(model: nn.Module, step: int) -> list[torch.Tensor]:
        rows, mask = batch(step).requires_grad_(use_reentrant), batch(step, width=4)
        found: Any = checkpoint(model, rows, mask, use_reentrant=use_reentrant) if is_outside else model(rows, mask)
        return [found.square().mean()]

    model = Net() if is_outside else Checkpointed(use_reentrant=use_reentrant)
    steps = recorded(tmp_path, train(call, model))
    # A reentrant checkpoint needs an input with a gradient, and these are no data.
    own = [(batch(step, width=4),) if use_reentrant else (batch(step), batch(step, width=4)) for step in range(2)]
    assert [step.samples for step in steps] == [(hashes(*tensors),) for tensors in own]
    assert [step.num_backwards for step in steps] == [1, 1]
    assert [len(step.losses) for step in steps] == [1, 1]
    assert not any(entry.moment is Moment.ACCUMULATED for step in steps for entry in step.entries)


def test_calls_of_one_backward_pass_are_one_microbatch(tmp_path: Path) -> None:
    """As a contrastive loss makes them."""

    def call(model: nn.Module, step: int) -> list[torch.Tensor]:
        return [(model(batch(step)) - model(batch(step + 10))).square().mean()]

    steps = recorded(tmp_path, train(call))
    assert [step.samples for step in steps] == [((*hashes(batch(step)), *hashes(batch(step + 10))),) for step in range(2)]


def test_two_backward_passes_through_one_call_are_one_microbatch(tmp_path: Path) -> None:
    """Losses may be differentiated one after another; so may inputs."""

    def call(model: nn.Module, step: int) -> list[torch.Tensor]:
        inputs = batch(step).requires_grad_()
        scores = model(inputs, batch(step, width=4))
        torch.autograd.grad(scores.sum(), inputs, retain_graph=True)
        scores.square().mean().backward(retain_graph=True)
        return [scores.sum()]

    steps = recorded(tmp_path, train(call))
    assert [step.samples for step in steps] == [(hashes(batch(step, width=4)),) for step in range(2)]
    assert [step.num_backwards for step in steps] == [1, 1]


def test_a_backward_pass_without_known_samples_shows(tmp_path: Path) -> None:
    """Rows that no module got are missing, so the verdict can say so."""
    weight = nn.Parameter(torch.ones(3))

    def call(model: nn.Module, step: int) -> list[torch.Tensor]:
        return [model(batch(step)).square().mean(), (weight * batch(step)).sum()]

    steps = recorded(tmp_path, train(call))
    assert [(len(step.samples), step.num_backwards) for step in steps] == [(1, 2), (1, 2)]


@pytest.mark.parametrize("as_list", [False, True])
def test_backward_passes_from_a_node_have_samples(tmp_path: Path, as_list: bool) -> None:
    """As torch 2.15's pipelines start them; there is no loss."""

    def run() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        edge = torch.autograd.graph.get_gradient_edge(model(batch(0)).square().mean())
        torch.autograd.backward([edge] if as_list else edge, [torch.ones(())])
        optimizer.step()

    (step,) = recorded(tmp_path, run)
    assert (step.samples, step.num_backwards, step.losses) == ((hashes(batch(0)),), 1, ())


def test_backward_passes_that_call_the_engine_directly_count(tmp_path: Path) -> None:
    """As Megatron's pipeline schedules do."""

    def run() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for part in batch(0).split(2):
            loss = model(part).square().mean()
            torch.autograd.Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
                (loss,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        optimizer.step()

    (step,) = recorded(tmp_path, run)
    assert step.samples == tuple(hashes(part) for part in batch(0).split(2))
    assert step.num_backwards == 2


def test_activations_of_another_model_are_no_samples(tmp_path: Path) -> None:
    """A discriminator gets a generator's output, whose bits depend on rounding."""

    def run() -> None:
        generator, discriminator = Net(3), Net(1)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (discriminator, generator)]
        for step in range(2):
            noise, real = batch(step + 10), batch(step)
            with torch.no_grad():
                unused = generator(noise)
            fake = generator(noise).detach()
            (discriminator(real).mean() - discriminator(fake).mean() + discriminator(unused).mean()).backward()
            optimizers[0].step()
            discriminator(generator(noise)).mean().backward()
            optimizers[1].step()

    steps = recorded(tmp_path, run)
    assert [step.samples for step in steps] == [(hashes(batch(number)),) for number in (0, 10, 1, 11)]


def test_parts_that_are_called_one_after_another_have_the_first_ones_samples(tmp_path: Path) -> None:
    """If a script calls the parts of its model, and never the model."""

    def call(model: Any, step: int) -> list[torch.Tensor]:
        positions = torch.arange(4.0).reshape(4, 1).expand(4, 3)
        return [model.two(torch.tanh(model.one(batch(step)) + model.one(positions))).square().mean()]

    steps = recorded(tmp_path, train(call))
    assert [step.samples for step in steps] == [(hashes(batch(step)),) for step in range(2)]
    names = {entry.piece.name for entry in steps[0].entries}
    assert names == {"one.weight", "one.bias", "two.weight", "two.bias"}


def test_a_model_that_returns_its_input_gets_data_again(tmp_path: Path) -> None:
    """The same tensor in each step is no activation."""

    class WithInput(Net):
        def forward(self, inputs: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
            return inputs, super().forward(inputs, scale)

    rows = batch(0)
    steps = recorded(tmp_path, train(lambda model, _: [model(rows)[1].square().mean()], WithInput()))
    assert [step.samples for step in steps] == [(hashes(rows),)] * 2


def test_parameters_that_become_plain_attributes_lose_no_samples(tmp_path: Path) -> None:
    """As those of a tensor-parallel model in DDP, from the first forward on."""

    class Replaced(Net):
        def forward(self, inputs: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
            for layer in (self.one, self.two):
                for name, parameter in [*layer.named_parameters()]:
                    delattr(layer, name)
                    setattr(layer, name, parameter.view_as(parameter))
            return super().forward(inputs, scale)

    def one_step() -> None:
        model = Replaced()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(batch(0)).square().mean().backward()
        assert not [*model.parameters()]
        optimizer.step()

    (step,) = recorded(tmp_path, one_step)
    assert step.samples == (hashes(batch(0)),)


def test_an_exception_in_a_forward_loses_no_later_samples(tmp_path: Path) -> None:
    """A script may catch it and go on."""

    def call(model: nn.Module, step: int) -> list[torch.Tensor]:
        with pytest.raises(RuntimeError):
            model(batch(step, width=5))
        return [model(batch(step)).square().mean()]

    steps = recorded(tmp_path, train(call))
    assert [step.samples for step in steps] == [(hashes(batch(step)),) for step in range(2)]


@pytest.mark.parametrize("how", ["torch.compile", "in place", "whole loss"])
def test_a_compiled_model_has_its_samples(tmp_path: Path, how: str) -> None:
    """The graph has no hooks, so they are called around it; steps end as in an eager run."""
    torch.manual_seed(0)
    model: Any = Net()
    if how == "torch.compile":
        model = torch.compile(model, backend="eager", fullgraph=True)

    def call(model: nn.Module, step: int) -> list[torch.Tensor]:
        return [model(batch(step)).square().mean()]

    def run() -> None:
        if how == "in place":
            model.compile(backend="eager", fullgraph=True)
        loss = torch.compile(call, backend="eager") if how == "whole loss" else call
        train(loss, model)()

    steps = recorded(tmp_path, run)
    assert [step.step for step in steps] == [0, 1]
    assert [len(step.losses) for step in steps] == [1, 1]
    assert [step.num_backwards for step in steps] == [1, 1]
    expected = [() if how == "whole loss" else (hashes(batch(step)),) for step in range(2)]
    assert [step.samples for step in steps] == expected
    if how == "in place":
        copied = copy.deepcopy(model)
        assert torch.equal(pickle.loads(pickle.dumps(model))(batch(0)), copied(batch(0)))


def test_a_model_is_called_inside_functional_transforms(tmp_path: Path) -> None:
    """Batched tensors have no rows to hash."""

    def call(model: nn.Module, step: int) -> list[torch.Tensor]:
        each = torch.func.vmap(model, randomness="error")(batch(step, 4).reshape(2, 2, 3))
        return [model(batch(step)).square().mean() + each.square().mean()]

    steps = recorded(tmp_path, train(call))
    assert [step.samples for step in steps] == [(hashes(batch(step)),) for step in range(2)]


def test_data_parallel_threads_are_one_call(tmp_path: Path) -> None:
    """`nn.DataParallel` calls its replicas in threads."""

    class Threads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            with ThreadPoolExecutor(2) as pool:
                return torch.cat(list(pool.map(self.net, inputs.split(2))))

    def call(model: nn.Module, step: int) -> list[torch.Tensor]:
        return [model(batch(step)).square().mean()]

    steps = recorded(tmp_path, train(call, Threads()))
    assert [step.samples for step in steps] == [(hashes(batch(step)),) for step in range(2)]
