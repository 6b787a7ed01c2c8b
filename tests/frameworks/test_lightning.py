"""Lightning's trainer on two ranks, by the version that is installed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

with contextlib.suppress(ModuleNotFoundError):
    from ecosystem import torchvision_operators  # noqa: F401 - before Lightning, which imports torchvision

from equivcheck import Outcome, UsageError, check_training
from equivcheck.scenario import LowPrecision
from equivcheck.user.trainers.lightning import Lightning
from equivcheck.user.verdict import UserVerdict
from equivcheck.worlds.trace.differences import Phase
from frameworks.pages import shown_output

lightning = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402 - if it is installed


def model() -> nn.Module:
    """Hidden features that two ranks share equally, and outputs that they do not."""
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def checked(trainer: Lightning, num_microbatches: int = 3, **arguments: Any) -> UserVerdict:
    """Two updates on two ranks."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    given: dict[str, Any] = {
        "model": model,
        "trainer": trainer,
        "mesh": {"dp": 2},
        "batches": [[(draw(6, 3), draw(6, 3)) for _ in range(num_microbatches)] for _ in range(2)],
        "loss": nn.functional.mse_loss,
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        "world": "gloo",
    }
    return check_training(**given | arguments)


def shard(built: nn.Module, mesh: Any) -> None:
    """FSDP2 with a unit for each layer."""
    for layer in built:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(built, mesh=mesh["data_parallel"])


def split(built: nn.Module, mesh: Any) -> None:
    """Tensor parallelism over the hidden features."""
    parallelize_module(built, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def split_and_shard(built: nn.Module, mesh: Any) -> None:
    """Both."""
    split(built, mesh)
    shard(built, mesh)


def model_parallel(num_data: int, num_tensor: int) -> ModelParallelStrategy:
    """Lightning's strategy for FSDP2 and tensor parallelism."""
    return ModelParallelStrategy(data_parallel_size=num_data, tensor_parallel_size=num_tensor)


NORM, VALUE = {"gradient_clip_val": 0.1}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
SETTINGS: list[Any] = [(1, {}), (3, {}), (3, NORM), (3, VALUE)]
LAYOUTS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[..., Any] | None, dict[str, int]]] = {
    "ddp": (dict, None, {"dp": 2}),
    "fsdp2": (lambda: {"strategy": model_parallel(2, 1)}, shard, {"dp": 2}),
    "tp": (lambda: {"strategy": model_parallel(1, 2)}, split, {"tp": 2}),
    "fsdp2 x tp": (lambda: {"strategy": model_parallel(2, 2)}, split_and_shard, {"dp": 2, "tp": 2}),
}


@pytest.mark.parametrize(("num_microbatches", "options"), SETTINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_equivalent(layout: str, num_microbatches: int, options: dict[str, Any]) -> None:
    """With accumulation and clipping."""
    make, parallelize, mesh = LAYOUTS[layout]
    trainer = Lightning(arguments={**make(), **options}, parallelize=parallelize)
    verdict = checked(trainer, num_microbatches, mesh=mesh)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    assert not verdict.unread


class Mine(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A user's LightningModule."""

    def __init__(self, network: nn.Module, loss: Callable[..., Any], divisor: int = 1) -> None:
        super().__init__()
        self.network, self.loss, self.divisor = network, loss, divisor

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        """With a divisor other than 1: a mistake, because Lightning has divided by it, too."""
        value = self.loss(self.network(batch[0]), batch[1]) / self.divisor
        self.log("loss", value, sync_dist=True)
        return value


def test_your_own_module_is_equivalent() -> None:
    """Also if it logs."""
    verdict = checked(Lightning(module=Mine))
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    assert not verdict.unread


def test_a_module_that_divides_by_the_number_of_microbatches() -> None:
    """Lightning has done so already."""
    verdict = checked(Lightning(module=partial(Mine, divisor=3)))
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.cause == shown_output("trainer_lightning"), verdict


MIXED: dict[str, Any] = {"dtype": torch.float32, "precision": LowPrecision.BFLOAT16}


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_autocast_is_equivalent(num_microbatches: int) -> None:
    """The single-device run has autocast at the same places."""
    trainer = Lightning(arguments={"precision": "bf16-mixed", **NORM})
    verdict = checked(trainer, num_microbatches, **MIXED)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict


def test_a_mistake_shows_under_autocast() -> None:
    """It is larger than bfloat16's rounding."""
    verdict = checked(Lightning(arguments={"precision": "bf16-mixed"}, module=partial(Mine, divisor=3)), **MIXED)
    assert verdict.outcome is Outcome.DIVERGED


class ClipsByParameter(Mine):
    """Replaces Lightning's clipping."""

    def configure_gradient_clipping(self, _optimizer: Any, gradient_clip_val: Any = None, **_options: Any) -> None:
        """Clip each parameter by its own norm: a mistake."""
        for parameter in self.parameters():
            nn.utils.clip_grad_norm_(parameter, gradient_clip_val)


def test_clipping_by_parameter_is_wrong_in_the_update() -> None:
    """The gradients that are recorded before it are right."""
    verdict = checked(Lightning(arguments=NORM, module=ClipsByParameter))
    assert verdict.divergence is not None, verdict
    assert verdict.divergence.phase is Phase.UPDATE


@pytest.mark.parametrize(
    ("trainer", "arguments", "words"),
    [
        (Lightning(), {"world": "sim"}, "it needs processes"),
        (Lightning(arguments={"strategy": "fsdp"}), {}, "its strategy 'fsdp' needs a GPU"),
        (Lightning(arguments={"precision": "bf16-true"}), {}, "its precision 'bf16-true' rounds at other points"),
        (Lightning(module=Mine, parallelize=shard), {}, "it has both module= and parallelize="),
    ],
)
def test_bad_input_is_one_line(trainer: Lightning, arguments: dict[str, Any], words: str) -> None:
    """It names the argument and the expected value."""
    with pytest.raises(UsageError) as raised:
        checked(trainer, **arguments)
    assert str(raised.value).startswith(f"check_training: trainer Lightning is not valid: {words}")
    assert "Expected " in str(raised.value)
