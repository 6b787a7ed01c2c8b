"""Recording changes no bit of a training on one device, and the trace is complete."""

from __future__ import annotations

import copy
import io
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import equivcheck
from equivcheck.recording.trace import Moment
from equivcheck.recording.trace_file import read_trace

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

STEPS = 3
Values = Iterator[Any]
"""A training: it yields its model before the first step, then whatever it computes."""


class Model(nn.Module):
    """Embedding, a block with dropout, and a head, with a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.up, self.norm, self.down = nn.Linear(8, 80), nn.LayerNorm(80), nn.Linear(80, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.recompute: bool | None = None

    def block(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states after the block."""
        return nn.functional.dropout(self.norm(torch.tanh(self.up(hidden))), 0.5)

    def forward(self, tokens: torch.Tensor) -> Any:
        """Scores with shape (rows, 3)."""
        self.calls += 1
        hidden = self.embedding(tokens)
        is_plain = self.recompute is None
        hidden = self.block(hidden) if is_plain else checkpoint(self.block, hidden, use_reentrant=self.recompute)
        return self.down(hidden)


def batches(count: int = STEPS, rows: int = 6) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Drawn with torch's global random numbers, so that a draw by the recorder would change the rest."""
    for _ in range(count):
        yield torch.randint(11, (rows,)), torch.randn(rows, 3)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def with_optimizer(make: Callable[[Any], torch.optim.Optimizer], change: Callable[[Model], Any] = lambda model: model) -> Any:
    """A plain loop with an optimizer and a changed model."""

    def train() -> Values:
        model = Model()
        called, optimizer = change(model), make(model.parameters())
        yield model
        for batch in batches():
            optimizer.zero_grad()
            loss = loss_of(called, batch)
            loss.backward()
            optimizer.step()
            yield loss.detach()
        yield from states(optimizer)

    return train


def states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Tensors in an optimizer's state."""
    return [value for each in optimizer.state.values() for value in each.values() if isinstance(value, torch.Tensor)]


def compiled(backend: str) -> Any:
    """A compiled model."""
    return with_optimizer(torch.optim.AdamW, lambda model: torch.compile(model, backend=backend))


def compiled_optimizer() -> Values:
    """An optimizer whose step is compiled."""
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=True)
    step = torch.compile(optimizer.step, backend="eager")
    yield model
    for batch in batches():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        step()
        yield loss.detach()


def recomputed(*, reentrant: bool) -> Any:
    """Activation checkpointing, with dropout in the recomputed block."""

    def change(model: Model) -> Model:
        model.recompute = reentrant
        return model

    return with_optimizer(torch.optim.AdamW, change)


def autocast(dtype: torch.dtype) -> Any:
    """Autocast with a scaler, which skips its first steps if the dtype overflows."""

    def train() -> Values:
        model = Model()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**8)
        yield model
        for batch in batches():
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            yield nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            yield from (loss.detach(), scaler.get_scale())

    return train


def several_optimizers() -> Values:
    """One for each half of the model, and a scheduler for each."""
    model = Model()
    halves = [[*model.embedding.parameters(), *model.up.parameters()], [*model.norm.parameters(), *model.down.parameters()]]
    optimizers = [torch.optim.AdamW(halves[0], lr=0.1), torch.optim.SGD(halves[1], lr=0.1, momentum=0.9)]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1) for each in optimizers]
    yield model
    for batch in batches():
        loss = loss_of(model, batch)
        loss.backward()
        for each in (*optimizers, *schedulers):
            each.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        yield loss.detach()


def optimizer_in_backward() -> Values:
    """Each parameter is updated as soon as it has its gradient."""
    model = Model()
    for parameter in model.parameters():
        own = torch.optim.AdamW([parameter], lr=0.1)

        def update(parameter: torch.Tensor, own: torch.optim.AdamW = own) -> None:
            own.step()
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(update)
    yield model
    for batch in batches():
        loss = loss_of(model, batch)
        loss.backward()
        yield loss.detach()


def accumulated(*, set_to_none: bool) -> Any:
    """Two microbatches for each step, and an evaluation after it."""

    def train() -> Values:
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
        yield model
        for _ in range(STEPS):
            for batch in batches(2):
                (loss_of(model, batch) / 2).backward()
            yield nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            model.eval()
            with torch.inference_mode():
                yield loss_of(model, next(batches())).clone()
            model.train()

    return train


def lbfgs() -> Values:
    """A closure that the optimizer calls several times."""
    model = Model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")
    yield model
    for batch in batches():

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        yield optimizer.step(closure).detach()


def per_sample_gradients() -> Values:
    """Gradients from `torch.func`, clipped for each sample."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = dict(model.named_parameters())

    def loss(own: dict[str, torch.Tensor], tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = torch.func.functional_call(model.embedding, {"weight": own["embedding.weight"]}, (tokens[None],))
        hidden = torch.func.functional_call(model.up, {"weight": own["up.weight"], "bias": own["up.bias"]}, (hidden,))
        return nn.functional.mse_loss(hidden[0, :3], targets)

    yield model
    for tokens, targets in batches():
        own = {name: parameter.detach() for name, parameter in parameters.items()}
        found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(own, tokens, targets)
        for name, parameter in parameters.items():
            parameter.grad = found[name].clamp(-0.1, 0.1).sum(0)
        optimizer.step()


def sparse() -> Values:
    """A sparse gradient."""
    model = Model()
    model.embedding.sparse = True
    rest = [parameter for name, parameter in model.named_parameters() if not name.startswith("embedding")]
    optimizers = [torch.optim.SparseAdam(model.embedding.parameters()), torch.optim.AdamW(rest)]
    yield model
    for batch in batches():
        loss = loss_of(model, batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield loss.detach()


def lazy() -> Values:
    """A parameter that gets its shape in the first call."""
    model = Model()
    model.up = nn.LazyLinear(80)  # type: ignore[assignment]
    yield model
    with torch.no_grad():
        model(torch.zeros(1, dtype=torch.int64))
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        yield loss.detach()


def copied() -> Values:
    """Model and optimizer are copied and saved in the loop, as averages and checkpoints do."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    average = torch.optim.swa_utils.AveragedModel(model)
    yield model
    for batch in batches():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        yield from (loss.detach(), *average.parameters(), *copy.deepcopy(model).parameters(), *states(copy.deepcopy(optimizer)))
        for each in (model, optimizer):
            torch.save(each, file := io.BytesIO())
            yield len(file.getvalue())


def own_hooks() -> Values:
    """Hooks of the script are called in their order, as often as without a recording."""
    model, calls = Model(), list[str]()
    optimizer = torch.optim.AdamW(model.parameters())

    def note(name: str) -> Callable[..., None]:
        return lambda *_: calls.append(name)

    model.register_forward_pre_hook(note("forward pre"))
    model.register_forward_hook(note("forward"))
    model.register_full_backward_hook(note("backward"))
    model.up.register_full_backward_pre_hook(note("up backward pre"))
    model.down.weight.register_hook(lambda gradient: gradient * 2)
    optimizer.register_step_pre_hook(note("step pre"))
    yield model
    nn.modules.module.register_module_forward_hook(note("any forward"))
    optimizer.register_step_post_hook(note("step"))
    for batch in batches():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        yield loss.detach()
    nn.modules.module._global_forward_hooks.clear()
    yield calls


def captured_backward() -> Values:
    """A script that took `torch.autograd.backward` before the recording began."""
    backward, model = torch.autograd.backward, Model()
    optimizer = torch.optim.AdamW(model.parameters())
    yield model
    for batch in batches():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        backward([loss])
        optimizer.step()
        yield loss.detach()


def from_an_edge() -> Values:
    """A backward pass that begins at an edge of the graph, as pipelines of torch 2.15 make them."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    yield model
    for batch in batches():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        edges: list[Any] = [torch.autograd.graph.get_gradient_edge(loss)]
        torch.autograd.backward(edges, [torch.ones(())])
        optimizer.step()
        yield loss.detach()


def counted() -> Values:
    """A mode of the script counts operations."""
    with FlopCounterMode(display=False) as counter:
        yield from with_optimizer(torch.optim.AdamW)()
    yield counter.get_total_flops()


def traced() -> Values:
    """The model is traced between two steps."""
    for value in with_optimizer(torch.optim.AdamW)():
        yield value
        if isinstance(value, Model):
            model = value
        else:
            yield str(torch.jit.trace(model, torch.zeros(2, dtype=torch.int64), check_trace=False).graph).count("=")


CASES: dict[str, Callable[[], Values]] = {
    "SGD": with_optimizer(torch.optim.SGD),
    "AdamW, fused": with_optimizer(lambda parameters: torch.optim.AdamW(parameters, fused=True)),
    "AdamW, foreach": with_optimizer(lambda parameters: torch.optim.AdamW(parameters, foreach=True)),
    "AdamW, maximize": with_optimizer(lambda parameters: torch.optim.AdamW(parameters, maximize=True)),
    "SGD, fused": with_optimizer(lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True, fused=True)),
    "Adagrad, fused": with_optimizer(lambda parameters: torch.optim.Adagrad(parameters, fused=True)),
    "Adafactor": with_optimizer(torch.optim.Adafactor),
    "RMSprop": with_optimizer(lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True)),
    "compiled, eager": compiled("eager"),
    "compiled, aot_eager": compiled("aot_eager"),
    "compiled optimizer": compiled_optimizer,
    "recomputed, reentrant": recomputed(reentrant=True),
    "recomputed": recomputed(reentrant=False),
    "autocast, bfloat16": autocast(torch.bfloat16),
    "autocast, float16": autocast(torch.float16),
    "several optimizers": several_optimizers,
    "optimizer in backward": optimizer_in_backward,
    "accumulated": accumulated(set_to_none=True),
    "accumulated, zeroed": accumulated(set_to_none=False),
    "LBFGS": lbfgs,
    "sparse": sparse,
    "lazy": lazy,
    "copied": copied,
    "own hooks": own_hooks,
    "captured backward": captured_backward,
    "from an edge": from_an_edge,
    "counted": counted,
    "traced": traced,
    "per-sample gradients": per_sample_gradients,
}


def values_of(case: Callable[[], Values], folder: Path | None) -> list[Any]:
    """All values, parameters, gradients and buffers, and the state of all random numbers."""
    torch.compiler.reset()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    training = case()
    model = next(training)
    with nullcontext() if folder is None else equivcheck.record(folder):
        found = list(training)
    found += [*model.parameters(), *(parameter.grad for parameter in model.parameters()), *model.buffers()]
    return [*found, torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]


def is_same(one: Any, other: Any) -> bool:
    """Whether two values have the same bits; NaN equals NaN."""
    if isinstance(one, torch.Tensor):
        one, other = (each.detach().to_dense().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
        return torch.equal(one, other)
    return bool(one == other)


@pytest.mark.parametrize("name", CASES)
def test_no_bit_changes(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And each step has the gradients and parameters of the whole model."""
    before, after = values_of(CASES[name], None), values_of(CASES[name], tmp_path)
    assert len(before) == len(after)
    assert [at for at, pair in enumerate(zip(before, after, strict=True)) if not is_same(*pair)] == []
    assert "equivcheck" not in capsys.readouterr().err
    (trace,) = read_trace(tmp_path)
    every = dict.fromkeys(dict(Model().named_parameters()), 1)
    assert [each.step for each in trace.steps] == [*range(STEPS)]
    for each in trace.steps:
        found = {
            moment: Counter(entry.piece.name for entry in each.entries if entry.moment is moment)
            for moment in (Moment.GRADIENT, Moment.UPDATE)
        }
        assert found == {Moment.GRADIENT: every, Moment.UPDATE: every}
    starts = {entry.piece.name for entry in trace.steps[0].entries if entry.moment is Moment.START}
    assert starts == set(every)
