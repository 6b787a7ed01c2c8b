"""Adapter for DeepSpeed's engines: ZeRO stages 0 to 3, and pipelines. Tried with versions 0.18.2 to 0.19.8 on the CPU.

DeepSpeed is imported on ranks only, in the world ``gloo``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grad_norm_

from equivcheck.user.loop import call_model
from equivcheck.user.trainers.deepspeed_muon import MUON, DeepSpeedMuon, run_muon_eagerly_in_float32, with_torch_adam
from equivcheck.user.trainers.frameworks.deepspeed_engine import RecordedEngine, import_deepspeed, restarted_engine
from equivcheck.user.trainers.protocol import Record, number_of_microbatches
from equivcheck.user.trainers.tried import Tried
from equivcheck.user.usage import invalid

PIPELINE_AXIS = "pp"
"""Mesh axis of a pipeline's stages. It comes before the data axis, because DeepSpeed numbers ranks in this order."""

UNREAD = {
    "tensor_parallel": "AutoTP splits parameters, and this adapter cannot tell where the parts lie",
    "sequence_parallel_size": "Ulysses splits sequences inside your attention, and equivcheck splits rows",
    "amp": "apex needs a GPU",
    "scheduler": "the single-device run has a constant learning rate",
}
"""Fields that end a check, and the reasons."""
SECTIONS = ("bf16", "checkpoint", "data_types", "fp16", "optimizer", "zero_optimization")
"""Fields whose values are objects."""
OFFLOADS = ("offload_optimizer", "offload_param")
"""Objects in ``zero_optimization``."""
SET_FIELDS = {"gradient_accumulation_steps", "optimizer", "train_batch_size", "train_micro_batch_size_per_gpu"}
"""Fields whose values follow from `check_training`'s arguments."""
UNREAD_OPTIMIZERS = {
    MUON: 'ZeRO flattens matrices before it calls your Muon; set "type": "Muon" in the config\'s optimizer to use DeepSpeed\'s',
    "onebitadam": "its compressed collectives need a GPU",
    "onebitlamb": "its compressed collectives need a GPU",
    "zerooneadam": "its compressed collectives need a GPU",
}
"""Optimizers that end a check, by lower-case type, and the reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeed:
    """Adapter for `deepspeed.initialize`. Takes a DeepSpeed configuration as a dict.

    The number of microbatches in an update comes from `batches`, and the optimizer from `check_training`. Batch sizes in the
    configuration are ignored. All other fields stay as they are. If the mesh has an axis ``pp``, the model must be a
    `torch.nn.Sequential`. DeepSpeed's `PipelineModule` then splits its layers into stages.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    """DeepSpeed's configuration."""
    pipeline: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for `PipelineModule`, such as ``partition_method``."""
    restart: Mapping[str, Any] | None = None
    """Configuration of a second engine, which loads the first engine's checkpoint after one update. None if there is only one
    engine.

    With ``{"checkpoint": {"load_universal": True}}`` in it, the checkpoint is converted to DeepSpeed's universal format.
    """
    gradients_are: Literal["unclipped", "clipped"] = "unclipped"
    """``"unclipped"``, because ZeRO keeps unclipped gradients until its step."""
    tried: ClassVar[tuple[Tried, ...]] = (Tried("deepspeed", "0.18.2", "0.19.8"),)
    """Tried versions."""

    def reference_step(self) -> Callable[..., Any]:
        """Return the training step for the single-device run. It averages losses over microbatches, and clips as configured."""
        for config in (self.config, self.restart or self.config):
            require_complete(config)
            if "gradient_clipping" not in config:  # 0.18.3 does not clip then, 0.19.8 clips at 1.0
                why = "its config has no gradient_clipping, whose default depends on DeepSpeed's version"
                raise invalid(
                    "trainer DeepSpeed", why, "gradient_clipping with the largest gradient norm, or 0.0 for no clipping"
                )
            _require_readable(config)
            _require_plain_muon(config)
        return self._step

    @property
    def _low_precision(self) -> torch.dtype | None:
        enabled = {kind for kind in ("bf16", "fp16") if self.config.get(kind, {}).get("enabled")}
        return torch.bfloat16 if "bf16" in enabled else torch.float16 if enabled else None

    @property
    def _loss_scale(self) -> float:
        if self._low_precision is not torch.float16:
            return 1.0
        given = self.config["fp16"]
        return float(given.get("loss_scale") or 2.0 ** given.get("initial_scale_power", 16))

    def _step(self, model: nn.Module, microbatches: Sequence[Any], optimizer: Any, loss: Any) -> dict[str, Any]:
        optimizer.zero_grad()
        total = 0.0
        for inputs, targets in microbatches:
            value = loss(call_model(model, inputs), targets) / len(microbatches)
            (value * self._loss_scale).backward()
            total += float(value.detach())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self._loss_scale
        limit = float(self.config["gradient_clipping"])
        norm = clip_grad_norm_(model.parameters(), limit or math.inf)
        optimizer.step()
        # DeepSpeed keeps no norm if it has no optimizer of its own.
        has_norm = self.config.get("zero_optimization", {}).get("stage") or self._low_precision is not None
        has_norm = has_norm and not uses_muon(self.config)  # its norm is that of updates
        return {"loss": total, "norm": norm} if has_norm else {"loss": total}

    def train(  # noqa: PLR0913, PLR0917 - the protocol
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        batches: Sequence[Sequence[Any]],
        loss: Callable[[Any, Any], torch.Tensor],
        make_optimizer: Callable[[list[Any]], Any],
        record: Record,
    ) -> None:
        """Train with DeepSpeed's engine on this rank. `record` gets each update's values."""
        deepspeed = import_deepspeed()
        number = number_of_microbatches(batches)
        self._require_accumulation(number)

        def build(config: Mapping[str, Any], model: nn.Module) -> RecordedEngine:
            shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
            is_pipeline = PIPELINE_AXIS in (mesh.mesh_dim_names or ())
            if is_pipeline and uses_muon(config):
                why = "equivcheck has not tried its Muon in a pipeline"
                raise invalid("trainer DeepSpeed", why, f"a mesh without {PIPELINE_AXIS}")
            module = self._stages(deepspeed, model, mesh, loss) if is_pipeline else model
            engine = self._engine(deepspeed, config, module, make_optimizer, number)
            return RecordedEngine(engine, shapes, loss, record, is_pipeline=is_pipeline)

        fresh = copy.deepcopy(model)
        engine = build(self.config, model)
        if self.restart is None:
            engine.train(batches)
        else:
            engine.train(batches[:1])
            with torch.no_grad():
                for parameter in fresh.parameters():
                    parameter.zero_()
            engine = restarted_engine(engine, lambda config: build(config, fresh), self.restart)
            engine.train(batches[1:])
        record.at_end([*engine.reader.state()])

    def _require_accumulation(self, number: int) -> None:
        kind = self.config.get("data_types", {}).get("grad_accum_dtype")
        if number > 1 and self._low_precision is not None and kind != "fp32":
            name = str(self._low_precision).removeprefix("torch.")
            why = f"it accumulates {number} microbatches in {name}, and the single-device run in float32"
            raise invalid("trainer DeepSpeed", why, 'data_types {"grad_accum_dtype": "fp32"} in its config, or one microbatch')

    def _stages(self, deepspeed: ModuleType, model: nn.Module, mesh: DeviceMesh, loss: Any) -> nn.Module:
        if not isinstance(model, nn.Sequential):
            raise invalid("trainer DeepSpeed", f"its pipeline got a {type(model).__name__}", "a torch.nn.Sequential of layers")
        if (mesh.mesh_dim_names or ())[0] != PIPELINE_AXIS:
            raise invalid(
                "trainer DeepSpeed", f"{PIPELINE_AXIS} is not the first axis", f'mesh={{"{PIPELINE_AXIS}": 2, "dp": 2}}'
            )
        own = {"layers": list(model), "num_stages": mesh.size(0), "loss_fn": loss}
        stages: nn.Module = deepspeed.pipe.PipelineModule(**{**self.pipeline, **own})
        return stages

    def _engine(
        self,
        deepspeed: ModuleType,
        config: Mapping[str, Any],
        model: nn.Module,
        make_optimizer: Callable[[list[Any]], Any],
        number: int,
    ) -> Any:
        config = {name: value for name, value in config.items() if name != "train_batch_size"}  # DeepSpeed computes it
        config |= {"gradient_accumulation_steps": number, "train_micro_batch_size_per_gpu": 1}
        config.setdefault("zero_allow_untested_optimizer", True)
        config.setdefault("zero_force_ds_cpu_optimizer", False)
        if any(getattr(parameter, "allreduce", True) is False for parameter in model.parameters()):
            why = "its model has DeepSpeed's MoE layers, whose experts have no single-device copy"
            raise invalid("trainer DeepSpeed", why, "a model whose experts are plain PyTorch modules")
        optimizer = make_optimizer(list(model.parameters()))
        given: dict[str, Any] = {"optimizer": optimizer}
        if uses_muon(config):
            _require_muon(optimizer)
            run_muon_eagerly_in_float32()
            config["optimizer"] = with_torch_adam(config["optimizer"])
            given = {"model_parameters": list(model.parameters())}
        else:
            _require_optimizer(type(optimizer).__name__.removeprefix("DeepSpeed").removesuffix("WithAuxAdam"))
        engine, *_ = deepspeed.initialize(model=model, config=config, **given)
        return engine


def require_complete(config: Mapping[str, Any]) -> None:
    """Raise `UsageError` if a DeepSpeed configuration has another type in a section, or ``"auto"`` as a value."""
    zero = config.get("zero_optimization", {})
    offloads = {name: zero.get(name) or {} for name in OFFLOADS} if isinstance(zero, Mapping) else {}
    for name, value in ({name: config.get(name, {}) for name in SECTIONS} | offloads).items():
        if not isinstance(value, Mapping):
            raise invalid("trainer DeepSpeed", f"its config has {name} {value!r}", f"a JSON object for {name}")
    if zero.get("stage", 0) not in range(4):
        raise invalid("trainer DeepSpeed", f"its ZeRO stage is {zero['stage']!r}", "0, 1, 2 or 3")
    for name, value in config.items():
        values = value.values() if isinstance(value, Mapping) else (value,)
        if name not in SET_FIELDS and "auto" in values:
            why = f'its config has "auto" in {name}'
            raise invalid("trainer DeepSpeed", why, 'values in place of "auto", which only transformers replaces')


def uses_muon(config: Mapping[str, Any]) -> bool:
    """Whether a DeepSpeed configuration has the optimizer Muon."""
    return str(config.get("optimizer", {}).get("type", "")).lower() == MUON


def _require_plain_muon(config: Mapping[str, Any]) -> None:
    if not uses_muon(config):
        return
    zero = config.get("zero_optimization", {})
    devices = {(zero.get(name) or {}).get("device", "none") for name in OFFLOADS}
    reasons = {
        "its Muon clips its updates, and not gradients": (config["gradient_clipping"], '"gradient_clipping": 0.0'),
        "its Muon in bf16 or fp16 has no single-device copy": (
            any(config.get(kind, {}).get("enabled") for kind in ("bf16", "fp16")),
            "float32",
        ),
        "its offloaded Muon was not tried": (devices != {"none"}, "no offload"),
    }
    for why, (is_given, expected) in reasons.items():
        if is_given:
            raise invalid("trainer DeepSpeed", why, expected)


def _require_muon(optimizer: Any) -> None:
    if not isinstance(optimizer, DeepSpeedMuon):
        why = f"its config has Muon, and one device has {type(optimizer).__name__}"
        expected = 'optimizer=lambda named_parameters: DeepSpeedMuon(named_parameters, **config["optimizer"]["params"])'
        raise invalid("trainer DeepSpeed", why, expected)


def _require_readable(config: Mapping[str, Any]) -> None:
    for name, why in UNREAD.items():
        if not _is_off(config.get(name)):
            raise invalid("trainer DeepSpeed", f"its config has {name}: {why}", f"a config without {name}")
    zero = config.get("zero_optimization", {})
    for name in OFFLOADS:
        if (zero.get(name) or {}).get("device") == "nvme":
            why = f"its {name} to nvme needs DeepSpeed's compiled file access"
            raise invalid("trainer DeepSpeed", why, 'the device "cpu", which gives the same numbers')
    if not uses_muon(config):
        _require_optimizer(str(config.get("optimizer", {}).get("type", "")))


def _is_off(value: Any) -> bool:
    if isinstance(value, Mapping):
        # DeepSpeed reads no "enabled" in its section for schedulers: a type is enough.
        return (value.get("enabled") is False and "type" not in value) or value.get("autotp_size", 2) < 2
    return not isinstance(value, list) and value in {None, 0, 1}


def _require_optimizer(name: str) -> None:
    why = UNREAD_OPTIMIZERS.get(name.lower())
    if why is not None:
        raise invalid("trainer DeepSpeed", f"its optimizer {name} cannot be read: {why}", "another optimizer, such as Adam")
