"""DeepSpeed's engine, by the installed version: run by ``tox run -e trainers``. `tools.trainers` has more configurations."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from equivcheck import Outcome, UsageError, check_training
from equivcheck.user.trainers.deepspeed import DeepSpeed
from equivcheck.user.trainers.deepspeed_muon import DeepSpeedMuon
from equivcheck.user.verdict import UserVerdict
from frameworks.pages import shown_output

deepspeed = pytest.importorskip("deepspeed")
VERSION = tuple(int(part) for part in deepspeed.__version__.split("+", maxsplit=1)[0].split("."))


def model() -> nn.Module:
    """Parameters that partitions cut anywhere."""
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def checked(
    stage: int, num_microbatches: int, limit: float, config: Mapping[str, Any] | None = None, **arguments: Any
) -> UserVerdict:
    """Two updates on two ranks."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    given: dict[str, Any] = {
        "model": model,
        "trainer": DeepSpeed(config={"zero_optimization": {"stage": stage}, "gradient_clipping": limit, **(config or {})}),
        "mesh": {"dp": 2},
        "batches": [[(draw(6, 3), draw(6, 2)) for _ in range(num_microbatches)] for _ in range(2)],
        "loss": nn.functional.mse_loss,
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        "dtype": torch.float32,
        "world": "gloo",
    }
    return check_training(**given | arguments)


CASES: list[Any] = [(stage, number, limit) for stage in range(4) for number, limit in ((1, 0.0), (3, 0.0), (3, 0.1))]


@pytest.mark.parametrize(("stage", "num_microbatches", "limit"), CASES)
def test_zero_is_equivalent(stage: int, num_microbatches: int, limit: float) -> None:
    """But for ZeRO-2 with accumulation before 0.18.3 (DeepSpeed issue #7718), which keeps the last microbatch only."""
    verdict = checked(stage, num_microbatches, limit)
    if VERSION < (0, 18, 3) and stage == 2 and num_microbatches > 1:
        assert verdict.outcome is Outcome.DIVERGED
        assert verdict.cause == "the gradient is from microbatch 2 (the last) only, weighted by its share"
    else:
        assert verdict.outcome is Outcome.EQUIVALENT, verdict
        assert not verdict.unread


def clipped_pipeline(stage: int) -> UserVerdict:
    """Two stages of a pipeline. Their gradients have a larger norm than the limit."""
    return checked(stage, 1, 0.1, mesh={"pp": 2})


def test_a_pipeline_without_zero_clips_by_its_first_stage() -> None:
    """A mistake in all versions. With ZeRO-1, it is right."""
    verdict = clipped_pipeline(0)
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.cause == shown_output("trainer_deepspeed"), verdict
    assert clipped_pipeline(1).outcome is Outcome.EQUIVALENT


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        ({"fp16": {"enabled": True}}, {}, "it accumulates 3 microbatches in float16, and the single-device run in float32"),
        ({"bf16": {"enabled": True}}, {}, "it accumulates 3 microbatches in bfloat16, and the single-device run in float32"),
        ({}, {"mesh": {"pp": 2}, "model": lambda: nn.Linear(3, 2)}, "its pipeline got a Linear"),
        ({}, {"mesh": {"dp": 1, "pp": 2}}, "pp is not the first axis"),
        ({}, {"world": "sim"}, "it needs processes"),
    ],
)
def test_bad_input_is_one_line(config: dict[str, Any], arguments: dict[str, Any], words: str) -> None:
    """It names the field and the expected value."""
    with pytest.raises(UsageError) as raised:
        checked(0, 3, 0.0, config, **arguments)
    assert str(raised.value).startswith(f"check_training: trainer DeepSpeed is not valid: {words}. Expected ")


def test_the_lock_of_a_killed_compilation_blocks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed would wait forever for it, so the adapter compiles nothing."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    for folder in (tmp_path, tmp_path / f"{python}_cpu"):
        (folder / "deepspeed_shm_comm").mkdir(parents=True)
        (folder / "deepspeed_shm_comm" / "lock").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert checked(0, 1, 0.0, deadline=60.0).outcome is Outcome.EQUIVALENT


MUON: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}
MUON_CONFIG = {"optimizer": {"type": "Muon", "params": MUON}}


def checked_muon(stage: int, num_microbatches: int, **zero: Any) -> UserVerdict:
    """Muon for matrices and Adam for biases."""
    config = {**MUON_CONFIG, "zero_optimization": {"stage": stage, **zero}}
    return checked(
        stage, num_microbatches, 0.0, config, optimizer=lambda named_parameters: DeepSpeedMuon(named_parameters, **MUON)
    )


@pytest.mark.skipif(VERSION < (0, 19, 8), reason="older versions have mistakes in Muon")
@pytest.mark.parametrize("stage", range(4))
def test_muon_is_equivalent(stage: int) -> None:
    """Its gradients are read before ZeRO writes updates in their place."""
    verdict = checked_muon(stage, 3, **({"reduce_scatter": False} if stage == 3 else {}))
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    assert not verdict.unread


def test_muon_in_a_pipeline_is_refused() -> None:
    """It was not tried."""
    with pytest.raises(UsageError, match="equivcheck has not tried its Muon in a pipeline"):
        checked(0, 1, 0.0, MUON_CONFIG, mesh={"pp": 2})


@pytest.mark.parametrize(
    ("limit", "config", "words"),
    [
        (0.1, {}, "its Muon clips its updates, and not gradients"),
        (0.0, {"bf16": {"enabled": True}}, "its Muon in bf16 or fp16 has no single-device copy"),
        (0.0, {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "its offloaded Muon was not tried"),
        (0.0, {}, "its config has Muon, and one device has Adam"),
    ],
)
def test_muon_that_cannot_be_compared_ends_with_one_line(limit: float, config: dict[str, Any], words: str) -> None:
    """It names the reason."""
    with pytest.raises(UsageError, match=words):
        checked(1, 1, limit, {**MUON_CONFIG, **config})


class Experts(nn.Linear):
    """Marks parameters as DeepSpeed's MoE layers do for the experts of a rank."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        for parameter in self.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]


class Muon(torch.optim.SGD):
    """An optimizer of this name."""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": Experts}, "its model has DeepSpeed's MoE layers"),
        ({"optimizer": lambda parameters: Muon(parameters, lr=0.1)}, "its optimizer Muon cannot be read"),
        ({"optimizer": DeepSpeedMuon}, "its optimizer Muon cannot be read"),
    ],
)
def test_parts_that_cannot_be_read_end_with_one_line(given: dict[str, Any], words: str) -> None:
    """It names the part and the reason."""
    with pytest.raises(UsageError, match=words):
        checked(1, 1, 0.0, **given)
