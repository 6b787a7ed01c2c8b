"""A DeepSpeed engine that records each update, and its restart from a checkpoint."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version

from equivcheck.user.batches import map_tensors
from equivcheck.user.loop import call_model
from equivcheck.user.trainers.deepspeed_muon import MUON
from equivcheck.user.trainers.frameworks.deepspeed_reading import EngineReader
from equivcheck.user.trainers.protocol import Record, import_framework

WAITS_FOR_ALL = Version("0.19.8")
"""First tried version whose ZeRO-3 waits for all of several all-gathers."""


def import_deepspeed() -> ModuleType:
    """Import DeepSpeed for the CPU, and let it use this process's group.

    DeepSpeed would compile shared-memory collectives for some minutes at its first start. If that start is killed, its lock
    remains, and later starts wait forever. The compilation is skipped, because gloo does not need these collectives. DeepSpeed
    also refuses float16 on most CPUs; here it is allowed, because torch can compute in float16.
    """
    packages = "--no-build-isolation deepspeed"  # its build imports torch
    deepspeed = import_framework("DeepSpeed", "deepspeed", packages, DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
    comm = import_module("deepspeed.comm.torch")  # `from deepspeed.comm import torch` gives torch itself
    comm.build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    import_module("deepspeed.utils.groups").mpu = None  # type: ignore[attr-defined]  # a pipeline in this process leaves its grid
    if Version(deepspeed.__version__.split("+")[0]) < WAITS_FOR_ALL:
        _wait_for_gathers()
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    return deepspeed


@cache
def _wait_for_gathers() -> None:
    """Let each all-gather be complete when it returns.

    ZeRO-3 waits only for the last of several. NCCL completes them in order, but gloo does not, and forward may read old weights.
    """
    comm: Any = import_module("deepspeed.comm")
    gather = comm.all_gather_into_tensor

    def gather_and_wait(*given: Any, **keywords: Any) -> Any:
        handle = gather(*given, **keywords)
        if handle is not None:
            handle.wait()
        return handle

    comm.all_gather_into_tensor = gather_and_wait


class RecordedEngine:
    """A DeepSpeed engine that records each update's values."""

    def __init__(
        self,
        engine: Any,
        shapes: Mapping[str, tuple[int, ...]],
        loss: Callable[[Any, Any], torch.Tensor],
        record: Record,
        *,
        is_pipeline: bool,
    ) -> None:
        """`shapes` has the full shapes by parameter name."""
        self.engine, self.reader = engine, EngineReader(engine, shapes)
        self._loss, self._record, self._is_pipeline = loss, record, is_pipeline
        update = engine._take_model_step  # clips and steps, in all versions that were tried

        def recorded_update(*given: Any, **keywords: Any) -> None:
            record.before_update(self.reader.gradients(), scale=self.reader.loss_scale)
            update(*given, **keywords)

        engine._take_model_step = recorded_update

    def train(self, batches: Sequence[Sequence[Any]]) -> None:
        """Train on `batches`, which has a list of microbatches for each update."""
        for microbatches in batches:
            cast = [(map_tensors(inputs, self._cast), targets) for inputs, targets in microbatches]
            # A pipeline returns the mean over all ranks' rows.
            total = float(self.engine.train_batch(iter(cast))) if self._is_pipeline else self._update(cast)
            reports_norm = self.engine.optimizer_name() != MUON  # its norm is that of updates
            norm = self.engine.get_global_grad_norm() if reports_norm else None
            self._record.after_update(total, self.reader.parameters(), norm=None if norm is None else float(norm))

    def _update(self, microbatches: Sequence[Any]) -> float:
        """Train on an update's microbatches. Returns the loss over this rank's rows."""
        total = 0.0
        for inputs, targets in microbatches:
            value = self._loss(call_model(self.engine, inputs), targets)
            total += float(value.detach()) / len(microbatches)
            self.engine.backward(value)
            self.engine.step()
        return total

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.bfloat16() if self.engine.bfloat16_enabled() else tensor.half() if self.engine.fp16_enabled() else tensor


def restarted_engine(
    old: RecordedEngine, build: Callable[[Mapping[str, Any]], RecordedEngine], config: Mapping[str, Any]
) -> RecordedEngine:
    """Save the engine's checkpoint, build a new engine with the configuration `config`, and load the checkpoint into it."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    old.engine.save_checkpoint(folder[0], tag="saved")
    dist.barrier()
    tag = "saved"
    if config.get("checkpoint", {}).get("load_universal"):
        tag = "universal"
        if dist.get_rank() == 0:
            _convert(Path(folder[0], "saved"), Path(folder[0], tag))
        dist.barrier()
    new = build(config)
    new.engine.load_checkpoint(folder[0], tag=tag)
    dist.barrier()
    return new


def _convert(saved: Path, universal: Path) -> None:
    convert = import_module("deepspeed.checkpoint.ds_to_universal")
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    places = {"input_folder": str(saved), "output_folder": str(universal)}
    convert.main(Namespace(**places, **options, inject_missing_state=True))
