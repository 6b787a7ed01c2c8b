"""Several optimizers, and optimizers that step inside backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import softplus
from torch.optim.optimizer import _global_optimizer_pre_hooks

from equivcheck import Outcome, UsageError, check_training
from equivcheck.user.traces.optimizers import optimizers_in
from equivcheck.worlds.trace.differences import Phase
from unit.user.programs import brought, sgd_of


class Pair(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


class Both(torch.optim.Optimizer):
    """Two optimizers as attributes. A step of this one does nothing."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.5})
        self.pair = adams(parameters)

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


class Holder:
    """Two optimizers as attributes of an object that is no optimizer."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.pair = adams(parameters)


def adams(parameters: list[nn.Parameter], lr: float = 0.01) -> list[torch.optim.Optimizer]:
    """One optimizer for the generator, one for the discriminator."""
    return [torch.optim.Adam(parameters[:2], lr=0.01), torch.optim.Adam(parameters[2:], lr=lr)]


def averaged(parameters: Any) -> None:
    """Average gradients over ranks."""
    for parameter in parameters if dist.is_initialized() else ():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def gan_step(get: Callable[[Any], Any], *, zeroes: bool = True, reduces: bool = True) -> Callable[..., Any]:
    """Update the discriminator, then the generator, whose loss leaves gradients in the discriminator."""

    def step(model: Pair, batch: Any, optimizer: Any, _loss: Any) -> torch.Tensor:
        noise, real = batch
        first, second = get(optimizer)
        if zeroes:
            second.zero_grad()
        fake = model.generator(noise).detach()
        value = softplus(-model.discriminator(real)).mean() + softplus(model.discriminator(fake)).mean()
        value.backward()
        averaged(model.discriminator.parameters() if reduces else ())
        second.step()
        first.zero_grad()
        if not zeroes:
            second.zero_grad()
        softplus(-model.discriminator(model.generator(noise))).mean().backward()
        averaged(model.generator.parameters())
        first.step()
        if isinstance(optimizer, Both):
            optimizer.step()
        return value.detach()

    return step


def gan(**changes: Any) -> dict[str, Any]:
    """A correct training of a generator and a discriminator."""
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randn(4, 3, generator=generator), torch.randn(4, 4, generator=generator)) for _ in range(3)]
    usual = {"model": Pair, "parallelize": lambda model, _mesh: model, "batches": rows, "optimizer": adams}
    return brought(**usual | {"step": gan_step(lambda pair: pair)} | changes)


@pytest.mark.parametrize(
    ("optimizer", "get"),
    [
        (adams, lambda pair: pair),
        (lambda parameters: dict(zip("gd", adams(parameters), strict=True)), lambda pair: pair.values()),
        (Both, lambda both: both.pair),
        (Holder, lambda both: both.pair),
    ],
    ids=["list", "dict", "optimizer", "object"],
)
def test_each_optimizer_has_its_own_gradients(optimizer: Any, get: Any) -> None:
    """Gradients are read when their own optimizer steps. Gradients of the generator's loss in the discriminator are ignored."""
    check_training(**gan(optimizer=optimizer, step=gan_step(get))).assert_equivalent()

    verdict = check_training(**gan(optimizer=optimizer, step=gan_step(get), rank_step=gan_step(get, zeroes=False)))
    assert verdict.outcome is Outcome.DIVERGED
    assert (verdict.divergence.step, verdict.divergence.phase) == (1, Phase.GRADIENT)
    assert "step 1 gradient discriminator.0.weight" in verdict.followers


def test_the_gradients_of_each_optimizer_are_compared() -> None:
    """A missing reduction of the first optimizer to step shows in its gradients."""
    verdict = check_training(**gan(rank_step=gan_step(lambda pair: pair, reduces=False)))
    assert (verdict.divergence.step, verdict.divergence.phase) == (0, Phase.GRADIENT)
    assert "step 0 gradient discriminator.0.weight" in verdict.followers


def test_the_state_and_the_settings_of_every_optimizer_are_compared() -> None:
    """A step count and a learning rate of the second optimizer are wrong on ranks."""

    def counting(by: int) -> Callable[..., Any]:
        def step(model: Pair, batch: Any, optimizer: Any, loss: Any) -> Any:
            value = gan_step(lambda pair: pair)(model, batch, optimizer, loss)
            for state in optimizer[1].state.values():
                state["step"] += by
            return value

        return step

    wrong = check_training(**gan(batches=gan()["batches"][:1], step=counting(0), rank_step=counting(1)))
    assert (wrong.divergence.phase, wrong.divergence.tensor) == (Phase.STATE, "discriminator.0.weight/step")

    def schedule(pair: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(pair[1], 3 if dist.is_initialized() else 9)

    found = check_training(**gan(scheduler=schedule)).divergence
    assert (found.phase, found.tensor) == (Phase.STATE, "discriminator.0.weight/lr")


def test_the_built_in_step_needs_one_optimizer() -> None:
    """Without `step`, nobody knows in which order several optimizers step."""
    with pytest.raises(UsageError, match=r"optimizer list .* step="):
        check_training(**brought(optimizer=lambda parameters: [torch.optim.SGD(parameters, lr=0.1)]))
    with pytest.raises(UsageError, match="optimizer"):
        check_training(**gan(optimizer=lambda _: [1, "sgd"]))


class InBackward(torch.optim.Optimizer):
    """One optimizer per parameter, which steps as soon as the gradient exists."""

    def __init__(self, parameters: list[nn.Parameter], *, hidden: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        inner = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in parameters}

        def update(parameter: nn.Parameter) -> None:
            inner[parameter].step()
            inner[parameter].zero_grad()

        for parameter in inner:
            parameter.register_post_accumulate_grad_hook(update)
        if not hidden:
            self.inner = inner

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


def sharded(model: nn.Module, mesh: Any) -> None:
    """Apply FSDP2."""
    from torch.distributed.fsdp import fully_shard

    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("usual_on_one_device", [False, True])
def test_optimizers_may_step_inside_backward(hidden: bool, usual_on_one_device: bool) -> None:
    """Their gradients are read at their own steps, even if the returned optimizer does not know them."""

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        is_usual = usual_on_one_device and not dist.is_initialized()
        return sgd_of(parameters) if is_usual else InBackward(parameters, hidden=hidden)

    check_training(**brought(parallelize=sharded, optimizer=optimizer)).assert_equivalent()

    def scaled(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(outputs, targets) * (1 + dist.is_initialized())

    verdict = check_training(**brought(parallelize=sharded, optimizer=optimizer, loss=scaled))
    assert verdict.outcome is Outcome.DIVERGED
    assert any("gradient" in follower for follower in verdict.followers)


def pair_step(model: nn.Module, batch: Any, optimizers: Any, loss: Any) -> Any:
    """Step the first optimizer with a closure, then the second."""

    def closure() -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        value = loss(model(batch[0]), batch[1])
        value.backward()
        return value

    value = optimizers[0].step(closure)
    optimizers[1].step()
    return value.detach()


def two_sgd(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """One optimizer for the first layer, one for the others."""
    return [sgd_of(parameters[:2]), sgd_of(parameters[2:])]


def test_gradients_from_a_closure_are_compared_next_to_others() -> None:
    """The first optimizer's gradients exist only after its closure has run."""
    usual = {"optimizer": two_sgd, "step": pair_step}
    check_training(**brought(**usual)).assert_equivalent()
    verdict = check_training(**brought(**usual, parallelize=lambda model, _mesh: model))
    assert (verdict.divergence.phase, verdict.divergence.tensor) == (Phase.GRADIENT, "0.weight")


def test_only_one_rank_may_have_full_tensors() -> None:
    """The gradients of several optimizers are joined on every rank, also on one that gathers nothing."""

    def on_first_rank(model: nn.Module) -> dict[str, torch.Tensor]:
        named = dict(getattr(model, "module", model).named_parameters())
        return {} if dist.get_rank() else named

    def step(model: nn.Module, batch: Any, optimizers: Any, loss: Any) -> Any:
        value = loss(model(batch[0]), batch[1])
        value.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return value.detach()

    check_training(**brought(optimizer=two_sgd, step=step, full_tensors=on_first_rank)).assert_equivalent()


class WithoutInit(torch.optim.Optimizer):
    """A wrapper that never calls `Optimizer.__init__`, such as `PostLocalSGDOptimizer` in torch."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:
        """Step the optimizer inside."""
        self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients."""
        self.inner.zero_grad(set_to_none)


def test_a_wrapper_without_hooks_is_an_optimizer() -> None:
    """Only the optimizer inside can have hooks."""

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if not dist.is_initialized():
            return sgd_of(parameters)
        return WithoutInit(sgd_of(parameters))

    for keep_dtype in (False, True):
        check_training(**brought(optimizer=optimizer, keep_dtype=keep_dtype)).assert_equivalent()


def test_no_hook_stays_registered() -> None:
    """After a check, the user's optimizers have no hooks, whether ranks finish or fail."""
    optimizers = []

    def kept(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizers.append(sgd_of(parameters))
        return optimizers[-1]

    def failing(_model: nn.Module, _batch: Any, _optimizer: torch.optim.Optimizer, _loss: Any) -> Any:
        dist.barrier()
        raise ValueError

    check_training(**brought(optimizer=kept)).assert_equivalent()
    assert check_training(**brought(optimizer=kept, rank_step=failing)).outcome is Outcome.CRASHED
    assert not any(each._optimizer_step_pre_hooks for each in optimizers)
    assert not _global_optimizer_pre_hooks


def test_optimizers_are_found_from_the_outside_in() -> None:
    """An outer optimizer comes first. Numbers and tensors contain none."""
    parameters = list(Pair().parameters())
    both = Both(parameters)
    assert optimizers_in(both) == [both, *both.pair]
    assert optimizers_in([1, parameters]) == []
