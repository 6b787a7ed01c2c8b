"""Adapter for `transformers.Trainer` under DDP, FSDP2 and tensor parallelism.

Tried with transformers 5.9 to 5.24 and torch 2.13, on the CPU. transformers is imported on ranks only, in the world ``gloo``.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar, Literal
from unittest import mock

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grad_norm_

from equivcheck.user.trainers.frameworks.hf_loop import HFLoop
from equivcheck.user.trainers.local_parts import chunk_parts
from equivcheck.user.trainers.protocol import Record, import_framework
from equivcheck.user.trainers.tried import Tried
from equivcheck.user.usage import invalid

PACKAGES = "transformers accelerate"
"""Packages that the trainer needs."""
TENSOR_AXIS = "tp"
"""Mesh axis of tensor parallelism."""
TAKES_CONFIG = Version("5.16")
"""First tried version that takes the size of the tensor-parallel group in `DistributedConfig`."""
IGNORED = -100
"""Label without a loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HFTrainer:
    """Adapter for `transformers.Trainer`. Takes arguments for `TrainingArguments`.

    Each microbatch is a pair ``(batch, None)``. A batch is a dict with the model's keywords, including ``labels``. The model
    returns its loss. The number of microbatches in an update comes from `batches`. All other arguments stay as they are.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for `transformers.TrainingArguments`."""
    trainer: Any = None
    """Your subclass of `transformers.Trainer`, if you have one."""
    shifts_labels: bool = True
    """Whether the model predicts the next token, so that each row's first label has no loss."""
    gradients_are: Literal["unclipped", "clipped"] = "clipped"
    """``"clipped"``, because the trainer's callbacks see gradients after clipping."""
    tried: ClassVar[tuple[Tried, ...]] = (Tried("transformers", "5.9", "5.24"),)
    """Tried versions."""

    def reference_step(self) -> Callable[..., Any]:
        """Return the training step for the single-device run.

        It averages over all labels in an update, and clips as configured.
        """
        low = [name for name in ("bf16", "fp16") if self.arguments.get(name)]
        if low:
            raise invalid(
                "trainer HFTrainer", f"its {low[0]} rounds at other points than the single-device run", f"{low[0]}=False"
            )
        return self._step

    def _step(self, model: nn.Module, microbatches: Sequence[Any], optimizer: Any, loss: Any) -> dict[str, Any]:
        optimizer.zero_grad()
        counts = [self._num_labels(batch) for batch, _ in microbatches]
        total = 0.0
        for (batch, targets), count in zip(microbatches, counts, strict=True):
            value = loss(model(**batch), targets) * (count / sum(counts))
            value.backward()
            total += float(value.detach())
        norm = clip_grad_norm_(model.parameters(), float(self.arguments.get("max_grad_norm", 1.0)) or math.inf)
        optimizer.step()
        return {"loss": total, "norm": norm}

    def _num_labels(self, batch: Mapping[str, torch.Tensor]) -> int:
        labels = batch["labels"][..., 1:] if self.shifts_labels else batch["labels"]
        return int((labels != IGNORED).sum())

    def train(  # noqa: PLR0913, PLR0917 - the protocol
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        batches: Sequence[Sequence[Any]],
        loss: Callable[[Any, Any], torch.Tensor],  # noqa: ARG002 - the model returns its loss
        make_optimizer: Callable[[list[Any]], Any],
        record: Record,
    ) -> None:
        """Train with transformers' trainer on this rank. `record` gets each update's values."""
        transformers = import_framework("HFTrainer", "transformers", PACKAGES)
        place: Any = list
        if TENSOR_AXIS in (mesh.mesh_dim_names or ()):  # transformers before 5.16 splits into plain tensors
            place = partial(chunk_parts, shapes=_shapes(model), rank=mesh.get_local_rank(TENSOR_AXIS))
        loop = HFLoop(
            transformers=transformers,
            trainer=self.trainer or transformers.Trainer,
            arguments=transformers.TrainingArguments,
            given=self.arguments,
            place=place,
        )
        with split_model(transformers, model, mesh) as split:
            loop.train(split, batches, make_optimizer, record)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@contextmanager
def split_model(transformers: ModuleType, model: nn.Module, mesh: DeviceMesh) -> Iterator[nn.Module]:
    """Yield the model, split by its own tensor-parallel plan if the mesh has an axis ``tp``.

    transformers splits a model only when it loads a checkpoint, so the model is saved first.
    """
    if TENSOR_AXIS not in (mesh.mesh_dim_names or ()):
        yield model
        return
    if mesh.ndim > 1:
        raise invalid("trainer HFTrainer", "its mesh has other axes next to tp", 'mesh={"tp": 2}')
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])  # type: ignore[operator]
    dist.barrier()
    given = {"tp_size": mesh.size(), "tp_plan": "auto"}
    if Version(transformers.__version__) >= TAKES_CONFIG:
        given = {"distributed_config": import_module("transformers.distributed").DistributedConfig(**given)}
    config: Any = import_module("accelerate.parallelism_config").ParallelismConfig
    # accelerate 1.15 refuses tensor parallelism on CPUs. No other line of it depends on the device.
    with mock.patch.object(config, "_validate_accelerator", return_value=None):
        split: nn.Module = type(model).from_pretrained(folder[0], dtype=torch.float32, **given)  # type: ignore[attr-defined]
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        for name, parameter in split.named_parameters():
            parameter.requires_grad_(name not in frozen)
        yield split
