"""Configurations of DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from equivcheck import Outcome
from equivcheck.scenario import ElementType, MixedPrecision
from equivcheck.user.trainers.deepspeed import DeepSpeed
from equivcheck.user.trainers.deepspeed_muon import DeepSpeedMuon
from equivcheck.user.verdict import UserVerdict
from tools.trainers.frameworks.settings import SETTINGS, check_in_float32
from tools.trainers.rows import Framework, Row

VERSIONS = ("0.18.2", "0.18.3", "0.19.2", "0.19.3", "0.19.8")
OLDEST, NEWEST = VERSIONS[0], VERSIONS[-1]
Config = Mapping[str, Any]
LOW = {"bf16": (ElementType.BFLOAT16, {"enabled": True}), "fp16": (ElementType.FLOAT16, {"enabled": True, "loss_scale": 1024.0})}
"""Element type and DeepSpeed's field for it."""
IN_FLOAT32 = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
"""Accumulation and reductions in float32."""


def model() -> nn.Module:
    """Layers that partitions and stages cut anywhere."""
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))


def rounded_model(kind: str) -> nn.Module:
    """Initial weights that a low precision represents, because DeepSpeed's master weights start from rounded ones."""
    return model().to(getattr(torch, LOW[kind][0].value))


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Loss in float32."""
    return nn.functional.mse_loss(outputs.float(), targets)


def batches(num_updates: int, num_microbatches: int) -> list[Any]:
    """Batches of six rows."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    return [[(draw(6, 3), draw(6, 2)) for _ in range(num_microbatches)] for _ in range(num_updates)]


def adam(parameters: list[Any]) -> torch.optim.Optimizer:
    """Optimizer with state."""
    return torch.optim.Adam(parameters, lr=0.01)


def sgd(parameters: list[Any]) -> torch.optim.Optimizer:
    """Optimizer without state."""
    return torch.optim.SGD(parameters, lr=0.1)


def stage(number: int, **fields: Any) -> Config:
    """Configuration of a ZeRO stage."""
    return {"zero_optimization": {"stage": number, **fields}}


def check(
    config: Config, num_microbatches: int = 1, limit: float = 0.0, *, restart: Config | None = None, **given: Any
) -> UserVerdict:
    """Two updates on two ranks in float32, or three with a restart after the first."""
    clipping = {"gradient_clipping": limit}
    trainer = DeepSpeed(config={**config, **clipping}, restart=None if restart is None else {**restart, **clipping})
    arguments: dict[str, Any] = {
        "model": model,
        "trainer": trainer,
        "batches": batches(2 if restart is None else 3, num_microbatches),
        "loss": squared_error,
        "optimizer": adam,
    }
    return check_in_float32(**arguments | given)


def check_low(kind: str, config: Config, *arguments: Any, reduce: ElementType | None = None, **given: Any) -> UserVerdict:
    """Check in bf16 or fp16 with float32 master weights."""
    low, field = LOW[kind]
    precision = MixedPrecision(param=low, reduce=reduce or low)
    return check({**config, kind: field}, *arguments, model=partial(rounded_model, kind), precision=precision, **given)


def _row(
    version: str, configuration: str, check: Callable[[], UserVerdict], cause: str = "", report: str = "", **given: Any
) -> Row:
    """A row, which is DIVERGED if it has a cause."""
    expected = {"expected": Outcome.DIVERGED if cause else Outcome.EQUIVALENT} | given
    return Row(version=version, configuration=configuration, check=check, cause=cause, report=report, **expected)


LAST_ONLY = "the gradient is from microbatch 2 (the last) only, weighted by its share"


def _zero() -> Iterator[Row]:
    for version in ("0.18.2", "0.18.3", "0.19.8"):
        for number in range(4):
            for name, setting in SETTINGS.items():
                is_wrong = version == "0.18.2" and number == 2 and setting[0] > 1
                known = (LAST_ONLY, "#7718") if is_wrong else ()
                yield _row(version, f"ZeRO-{number}, {name}", partial(check, stage(number), *setting), *known)


ACCUMULATED = {
    "0.18.2": ("the gradient is the sum over the 3 microbatches, not the mean", "#7773"),
    "0.19.2": ("the gradients of `0.weight` and `0.bias` are divided by the number of microbatches twice", "#8152, #8154"),
}
"""Mistakes of pipelines with accumulation."""
FIRST_STAGE = "all ranks clip by the norm over the elements that rank 0 holds"


def _pipelines() -> Iterator[Row]:
    meshes = {"pipeline of 2": {"pp": 2}, "pipeline of 2 x 2 data-parallel ranks": {"pp": 2, "dp": 2}}
    for version in ("0.18.2", "0.19.2", "0.19.3", "0.19.8"):
        for name, mesh in meshes.items():
            yield _row(version, f"{name}, 1 microbatch", partial(check, {}, mesh=mesh))
            known = ACCUMULATED.get(version, ())
            yield _row(version, f"{name}, 3 microbatches", partial(check, {}, 3, mesh=mesh), *known)
            yield _row(version, f"{name}, 1 microbatch, clipping", partial(check, {}, 1, 0.1, mesh=mesh), FIRST_STAGE, "none")
            yield _row(version, f"{name}, ZeRO-1, 1 microbatch, clipping", partial(check, stage(1), 1, 0.1, mesh=mesh))


LOSS_SCALES = {
    ("0.18.2", "bf16"): ("`norm` is a value", "#7837"),
    ("0.18.2", "fp16"): ("`norm` is a value", "#7837 (same line)"),
    ("0.19.8", "fp16"): ("step 0 gradient 0.weight", "#8393"),
}
"""Mistakes of engines without ZeRO in low precision: a norm that still has the loss scale, and a loss without it."""


def _low() -> Iterator[Row]:
    for version in (OLDEST, NEWEST):
        for kind in LOW:
            for number in (1, 2, 3):
                low = partial(check_low, kind, stage(number), 1, 0.1)
                yield _row(version, f"{kind}, ZeRO-{number}, 1 microbatch, clipping", low)
            known = LOSS_SCALES.get((version, kind), ())
            yield _row(version, f"{kind}, ZeRO-0, SGD", partial(check_low, kind, {}, optimizer=sgd), *known)
    # The wrapper's first call of `step`, which only makes the state, counts as Adam's first step.
    yield _row(NEWEST, "bf16, ZeRO-0, Adam", partial(check_low, "bf16", {}), "step 0 update 0.weight", "#5104, for ZeRO-1 to 3")
    accumulated = partial(check_low, reduce=ElementType.FLOAT32)
    for kind, number in (("bf16", 1), ("bf16", 2), ("bf16", 3), ("fp16", 2), ("fp16", 3)):
        in_float32 = partial(accumulated, kind, {**stage(number), **IN_FLOAT32}, 3, 0.1)
        yield _row(NEWEST, f"{kind}, ZeRO-{number}, 3 microbatches in fp32, clipping", in_float32)
    pipeline = partial(accumulated, "bf16", {**stage(1), **IN_FLOAT32}, 3, 0.1, mesh={"pp": 2})
    yield _row(NEWEST, "bf16, pipeline of 2, ZeRO-1, 3 microbatches in fp32, clipping", pipeline)


UNIVERSAL = {"checkpoint": {"load_universal": True}}


def _checkpoints() -> Iterator[Row]:
    for before, after in ((0, 0), (1, 2), (2, 1), (3, 3)):
        loaded = partial(check, stage(before), 3, 0.1, restart=stage(after))
        yield _row(NEWEST, f"checkpoint of ZeRO-{before}, loaded by ZeRO-{after}", loaded)
    for before, after in ((1, 2), (2, 3), (3, 1)):
        loaded = partial(check, stage(before), 3, 0.1, restart={**stage(after), **UNIVERSAL})
        known: dict[str, Any] = {"cause": "AssertionError", "expected": Outcome.CRASHED} if 3 in (before, after) else {}
        yield _row(NEWEST, f"universal checkpoint of ZeRO-{before}, loaded by ZeRO-{after}", loaded, **known)
    unlike = partial(check, stage(0), 3, 0.1, restart=stage(1))
    yield _row(NEWEST, "checkpoint of ZeRO-0, loaded by ZeRO-1", unlike, cause="FileNotFoundError", expected=Outcome.CRASHED)


def _offload() -> Iterator[Row]:
    cpu = {"device": "cpu"}
    for number in (1, 2, 3):
        offloaded = partial(check, stage(number, offload_optimizer=cpu), 3, 0.1)
        yield _row(NEWEST, f"ZeRO-{number}, optimizer offloaded, 3 microbatches, clipping", offloaded)
    both = partial(check, stage(3, offload_optimizer=cpu, offload_param=cpu), 3, 0.1)
    yield _row(NEWEST, "ZeRO-3, optimizer and parameters offloaded, 3 microbatches, clipping", both)


MUON = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01, "betas": [0.9, 0.95], "eps": 1e-8}


def square_model() -> nn.Module:
    """Matrices of one shape: 0.19.3 gathers Muon's updates of two matrices in one call, for which gloo wants equal shapes."""
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def error_of_columns(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Loss of the first outputs."""
    return squared_error(outputs[:, : targets.shape[1]], targets)


def check_muon(number: int, num_microbatches: int = 1, **zero: Any) -> UserVerdict:
    """Check Muon for matrices and Adam for biases, under a ZeRO stage."""
    config = {**(stage(number, **zero) if number else {}), "optimizer": {"type": "Muon", "params": MUON}}
    given: dict[str, Any] = {"model": square_model, "loss": error_of_columns} if number == 3 else {}
    return check(config, num_microbatches, optimizer=lambda named_parameters: DeepSpeedMuon(named_parameters, **MUON), **given)


def _muon() -> Iterator[Row]:
    for version in (OLDEST, "0.19.3", NEWEST):
        sgd_mistake = {"cause": "step 0 update 0.weight", "report": "#8441"} if version != NEWEST else {}
        yield _row(version, "Muon without ZeRO", partial(check_muon, 0, 3), **sgd_mistake)
        for number in (1, 2):
            scatter_mistake = {"cause": "step 0 gradient", "report": "#7807"} if version == OLDEST else {}
            yield _row(version, f"Muon, ZeRO-{number}, reduce_scatter", partial(check_muon, number), **scatter_mistake)
            last_only = {"cause": "step 0 gradient", "report": "#7718"} if (version, number) == (OLDEST, 2) else {}
            whole = partial(check_muon, number, 3, reduce_scatter=False)
            yield _row(version, f"Muon, ZeRO-{number}, 3 microbatches", whole, **last_only)
        if version != OLDEST:  # which refuses Muon under ZeRO-3
            accumulation_mistake = {"cause": "step 0 update", "report": "#8443"} if version != NEWEST else {}
            yield _row(version, "Muon, ZeRO-3, 1 microbatch", partial(check_muon, 3, reduce_scatter=False))
            accumulated = partial(check_muon, 3, 3, reduce_scatter=False)
            yield _row(version, "Muon, ZeRO-3, 3 microbatches", accumulated, **accumulation_mistake)


DEEPSPEED = Framework(
    name="DeepSpeed",
    versions={version: (f"deepspeed=={version}",) for version in VERSIONS},
    rows=(*_zero(), *_pipelines(), *_low(), *_checkpoints(), *_offload(), *_muon()),
    environment={"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"},
)
