"""A trainer that is right agrees with one device. A wrong one, or a wrong adapter, does not."""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib import metadata
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from equivcheck import LocalPart, Outcome, UsageError, check_training
from equivcheck.user.trainers.deepspeed import DeepSpeed
from equivcheck.user.trainers.frameworks.hf_loop import HFLoop
from equivcheck.user.trainers.lightning import Lightning
from equivcheck.user.trainers.protocol import import_framework
from equivcheck.user.trainers.tried import Tried
from equivcheck.user.verdict import UserVerdict
from equivcheck.worlds.trace.differences import Difference, Phase
from unit.user.trainers.flat_engine import FlatEngine


def model() -> nn.Module:
    """Parameters that partitions cut anywhere."""
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def batches(num_microbatches: int) -> list[Any]:
    """Two updates."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    return [[(draw(6, 3), draw(6, 2)) for _ in range(num_microbatches)] for _ in range(2)]


def checked(engine: Any, num_microbatches: int = 3, num_ranks: int = 2, **arguments: Any) -> UserVerdict:
    """The verdict on a trainer."""
    given: dict[str, Any] = {
        "model": model,
        "trainer": engine,
        "mesh": {"dp": num_ranks},
        "batches": batches(num_microbatches),
        "loss": nn.functional.mse_loss,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    }
    return check_training(**given | arguments)


@pytest.mark.parametrize("limit", [None, 0.1])
@pytest.mark.parametrize("scale", [1.0, 64.0])
@pytest.mark.parametrize(("num_microbatches", "num_ranks"), [(1, 2), (3, 2), (2, 3)])
def test_a_right_trainer_is_equivalent(limit: float | None, scale: float, num_microbatches: int, num_ranks: int) -> None:
    """With its partitioned gradients and state, its loss scale, clipping, and the norm that it reports."""
    verdict = checked(FlatEngine(limit=limit, loss_scale=scale), num_microbatches, num_ranks)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    assert not verdict.unread


@pytest.mark.usefixtures("with_causes")
@pytest.mark.parametrize(
    ("mistake", "phase", "cause"),
    [
        ({"keeps_first": False}, Phase.GRADIENT, "the gradient is from microbatch 2 (the last) only, weighted by its share"),
        ({"divides_twice": True}, Phase.GRADIENT, "the gradient is divided by the number of microbatches twice"),
        ({"averages": False}, Phase.GRADIENT, "all gradients are the sum over the 2 dp ranks, not the mean"),
        ({"shift": 1}, Phase.GRADIENT, ""),
        ({"loss_scale": 64.0, "unscales": False}, Phase.UPDATE, ""),
        ({"loss_scale": 64.0, "unscales_norm": False}, Phase.REPORTED, ""),
        ({"clips_by_own_norm": True}, Phase.UPDATE, ""),
        ({"clips": False}, Phase.UPDATE, "gradients are not clipped"),
        ({"gathers": False}, Phase.UPDATE, "updates by other ranks never reach ranks 0 and 1"),
        ({"reads_early": True}, Phase.GRADIENT, ""),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_wrong_trainer_diverges(mistake: dict[str, Any], phase: Phase, cause: str) -> None:
    """At the phase that is wrong first. A mistake in the engine has its cause; one in the adapter has none."""
    verdict = checked(FlatEngine(limit=0.1, **mistake))
    assert verdict.outcome is Outcome.DIVERGED, verdict
    assert verdict.divergence is not None
    assert verdict.divergence.phase is phase
    assert verdict.cause == cause, verdict


class Unrecorded(FlatEngine):
    """Records no optimizer state."""

    def train(self, *arguments: Any) -> None:  # type: ignore[override]
        """Leave out the optional call."""
        arguments[-1].at_end = lambda _parts: None
        super().train(*arguments)


class Scaled(nn.Sequential):
    """A model with a buffer."""

    def __init__(self) -> None:
        super().__init__(*model())
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Scale the outputs."""
        return super().forward(inputs) * self.scale


@pytest.mark.usefixtures("with_causes")
def test_values_that_a_trainer_leaves_out_hide_no_cause() -> None:
    """State is optional, and trainers record no buffers."""
    verdict = checked(Unrecorded(averages=False), model=Scaled)
    assert verdict.cause == "all gradients are the sum over the 2 dp ranks, not the mean", verdict


@pytest.mark.parametrize("mistake", [{"gathers": False}, {"replica_error": 2.0**-52}])
def test_replicas_that_differ_need_no_tolerance(mistake: dict[str, Any]) -> None:
    """Ranks that keep old parameters of others disagree, and so do ranks that differ in the last bit."""
    verdict = checked(FlatEngine(**mistake))
    assert verdict.divergence is not None
    assert verdict.divergence.difference is Difference.RANKS_DISAGREE


class Silent(FlatEngine):
    """Records no update."""

    def train(self, *_arguments: Any) -> None:  # type: ignore[override]
        """Do nothing."""


class Misplaced(FlatEngine):
    """Gives a shard without its place."""

    def train(self, *arguments: Any) -> None:  # type: ignore[override]
        """Record one part."""
        arguments[-1].before_update([LocalPart(name="0.weight", shape=(5, 3), tensor=torch.zeros(2, 3))])


class RecordsTwice(FlatEngine):
    """Records gradients in two calls, of which the second would replace the first."""

    def train(self, *arguments: Any) -> None:  # type: ignore[override]
        """Record one part in each call."""
        for name in ("0.bias", "2.bias"):
            bias = dict(arguments[0].named_parameters())[name]
            arguments[-1].before_update([LocalPart(name=name, shape=tuple(bias.shape), tensor=bias)])


def deepspeed(**config: Any) -> DeepSpeed:
    """An adapter whose configuration has these fields."""
    return DeepSpeed(config={"gradient_clipping": 0.0, **config})


MUON = {"optimizer": {"type": "Muon"}}


@pytest.mark.parametrize(
    ("engine", "arguments", "words"),
    [
        (RecordsTwice(), {}, "trainer is not valid: it called record.before_update twice before update 0"),
        (Silent(), {}, "trainer is not valid: it recorded 0 updates for 2 batches"),
        (
            Misplaced(),
            {},
            "part '0.weight' is not valid: its tensor has the shape (2, 3), and its position in (5, 3) is not given",
        ),
        (FlatEngine(), {"parallelize": lambda model, mesh: model}, "parallelize together with trainer is not valid"),
        (FlatEngine(), {"step": lambda model, batch, optimizer, loss: None}, "step together with trainer is not valid"),
        (None, {}, "parallelize is not valid: it is missing"),
        (DeepSpeed(), {}, "trainer DeepSpeed is not valid: its config has no gradient_clipping, whose default depends on"),
        (
            deepspeed(tensor_parallel={"autotp_size": 2}),
            {},
            "trainer DeepSpeed is not valid: its config has tensor_parallel",
        ),
        (
            deepspeed(sequence_parallel_size=2),
            {},
            "trainer DeepSpeed is not valid: its config has sequence_par",
        ),
        (deepspeed(tensor_parallel=[2]), {}, "trainer DeepSpeed is not valid: its config has tensor_parallel"),
        (deepspeed(optimizer={"type": None}), {}, "trainer DeepSpeed is not valid: it needs processes"),
        (
            deepspeed(scheduler={"type": "WarmupLR", "enabled": False}),
            {},
            "trainer DeepSpeed is not valid: its config has scheduler: the single-",
        ),
        (deepspeed(gradient_clipping="auto"), {}, 'trainer DeepSpeed is not valid: its config has "auto" in gradient_clipping'),
        (deepspeed(amp={"enabled": True}), {}, "trainer DeepSpeed is not valid: its config has amp: apex needs a GPU"),
        (deepspeed(**MUON, gradient_clipping=0.1), {}, "trainer DeepSpeed is not valid: its Muon clips its updates"),
        (deepspeed(**MUON, bf16={"enabled": True}), {}, "trainer DeepSpeed is not valid: its Muon in bf16 or fp16 has no"),
        (
            deepspeed(**MUON, zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu"}}),
            {},
            "trainer DeepSpeed is not valid: its offloaded Muon was not tried",
        ),
        (
            deepspeed(**MUON, zero_optimization={"stage": 1, "offload_optimizer": {"device": "none"}}),
            {},
            "trainer DeepSpeed is not valid: it needs processes",
        ),
        (deepspeed(optimizer={"type": "OneBitAdam"}), {}, "trainer DeepSpeed is not valid: its optimizer OneBitAdam cannot be"),
        (
            deepspeed(zero_optimization={"stage": 3, "offload_param": {"device": "nvme"}}),
            {},
            "trainer DeepSpeed is not valid: its offload_param to nvme needs",
        ),
        (DeepSpeed(config={"gradient_clipping": 0.0}), {}, "trainer DeepSpeed is not valid: it needs processes. Expected world="),
        (Lightning(), {}, "trainer Lightning is not valid: it needs processes. Expected world="),
        (
            Lightning(),
            {"scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)},
            "scheduler together with trainer is not valid: Lightning trains with a constant learning rate. Expected a training",
        ),
        (Lightning(arguments={"strategy": "fsdp"}), {}, "trainer Lightning is not valid: its strategy 'fsdp' needs a GPU"),
        (Lightning(arguments={"precision": "16-mixed"}), {}, "trainer Lightning is not valid: its precision '16-mixed' rounds"),
    ],
)
def test_bad_input_is_one_line(engine: Any, arguments: dict[str, Any], words: str) -> None:
    """Also if the adapter is wrong on a rank."""
    with pytest.raises(UsageError) as raised:
        checked(engine, **arguments)
    assert str(raised.value).startswith(f"check_training: {words}")


class Incomplete(FlatEngine):
    """Refuses its configuration on a rank."""

    def train(self, *_arguments: Any) -> None:  # type: ignore[override]
        """Refuse it because of another error."""
        raise UsageError("check_training: trainer is not valid: it has no field. Expected one.") from KeyError("field")


def test_a_refusal_on_a_rank_does_not_name_its_cause() -> None:
    """Its message says all."""
    with pytest.raises(UsageError) as raised:
        checked(Incomplete())
    assert str(raised.value) == "check_training: trainer is not valid: it has no field. Expected one."


def test_a_missing_accelerate_has_its_package_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer can be imported without it."""
    monkeypatch.setitem(sys.modules, "accelerate", None)
    loop = HFLoop(transformers=None, trainer=FlatEngine, arguments=None, given={})
    with pytest.raises(UsageError, match=r"trainer FlatEngine is not valid: it cannot .* Expected pip install accelerate"):
        loop.train(model(), batches(1), torch.optim.AdamW, mock.Mock())


class Demanding:
    """Arguments that refuse each value, in two lines."""

    def __init__(self, **_given: Any) -> None:
        raise ValueError("a bad value:\n  it is 1")


def test_refused_arguments_are_one_line() -> None:
    """Also if the framework's message has several."""
    loop = HFLoop(transformers=None, trainer=FlatEngine, arguments=Demanding, given={})
    with pytest.raises(UsageError) as raised:
        loop._built_arguments({})
    assert "Demanding refuses its arguments (a bad value: it is 1). Expected arguments that" in str(raised.value)


def test_a_part_has_one_place() -> None:
    """A box or a run."""
    with pytest.raises(UsageError, match="it has a start and an offset"):
        LocalPart(name="weight", shape=(2, 2), tensor=torch.zeros(1), start=(0, 1), offset=1)
    with pytest.raises(UsageError, match="another length than shape"):
        LocalPart(name="weight", shape=(2, 2), tensor=torch.zeros(1), start=(1,))


def test_a_framework_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line says which package to install."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    with mock.patch.dict(os.environ), pytest.raises(UsageError) as raised:
        import_framework("Mine", "no_such_framework", "no-such-framework")
    assert str(raised.value).startswith("check_training: trainer Mine is not valid: ")
    assert "it cannot be imported (No module named 'no_such_framework'). Expected pip" in str(raised.value)


class WithVersions(FlatEngine):
    """An adapter that was tried with certain versions of a framework."""

    tried = (Tried("flat", "0.9.1", "1.4"), Tried("no-such-framework", "1.0", "1.0"))


@pytest.mark.parametrize(
    ("installed", "is_tried"),
    [("0.9.0", False), ("0.9.1", True), ("1.3.9", True), ("1.4.7", True), ("1.5.0", False), ("2.0", False), ("0.8", False)],
)
def test_an_untried_version_is_noted(monkeypatch: pytest.MonkeyPatch, installed: str, *, is_tried: bool) -> None:
    """Older and newer versions run, and the verdict has one line about them."""
    install(monkeypatch, installed)
    verdict = checked(WithVersions(), 1)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    expected = f"untried version: flat {installed}; if it fails, try 0.9.1 to 1.4"
    assert verdict.notes == (() if is_tried else (expected,))
    assert (f"  note:  {expected}" in str(verdict).splitlines()) is not is_tried


class WithoutMethod(WithVersions):
    """An adapter that misses a method in a newer version."""

    def train(self, *_given: Any) -> None:
        """Fail."""
        raise AttributeError("module 'flat' has no attribute 'train'")


@pytest.mark.parametrize(
    ("engine", "outcome"), [(WithVersions(averages=False), Outcome.DIVERGED), (WithoutMethod(), Outcome.CRASHED)]
)
def test_an_untried_version_is_noted_if_it_fails(monkeypatch: pytest.MonkeyPatch, engine: FlatEngine, outcome: Outcome) -> None:
    """The version may be the reason."""
    install(monkeypatch, "2.0")
    verdict = checked(engine, 1)
    assert verdict.outcome is outcome, verdict
    assert verdict.notes == ("untried version: flat 2.0; if it fails, try 0.9.1 to 1.4",)


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Pretend that a version of the framework is installed."""
    find = metadata.version
    monkeypatch.setattr(metadata, "version", lambda package: version if package == "flat" else find(package))
