"""Stand-ins that let torchtitan's `Trainer` train on the CPU. They replace parts that need CUDA or files, and change no number.

Tried with torchtitan 0.3 on torch 2.13.

| what needs CUDA or files | stand-in | reason |
|---|---|---|
| `device_type` and `device_module` in six modules | the CPU | torchtitan takes CUDA if torch finds no accelerator |
| five functions on the device's name and memory | constants | figures in logs, which `torch.cpu` lacks |
| `set_device`, `current_device`, `device_count` | one CPU | `torch.cpu` takes no device with an index |
| `set_pg_timeouts` | nothing | gloo's barrier takes no device numbers |
| `time.sleep` at the end of `Trainer.train` | nothing | rank 0 waits two seconds for logs |
| FlexAttention and variable-length attention | `ScaledDotProductAttention`, causal | they are compiled, or made for CUDA |
| tokenizer and data loader | this rank's batches | they read files |
| FSDP's reduction with a factor | a sum | gloo has no such reduction, and torchtitan's factor is 1 |
| CUDA graphs | off | they record CUDA kernels |
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def replace_attention(config: Any) -> None:
    """Replace the attention in a model's configuration by one that runs on the CPU."""
    from torchtitan.models.common import attention  # type: ignore[import-not-found, unused-ignore]

    for kind in (attention.FlexAttention.Config, attention.VarlenAttention.Config):
        for _name, _config, parent, field in [*config.traverse(kind)]:
            if isinstance(field, int):
                parent[field] = attention.ScaledDotProductAttention.Config()
            else:
                setattr(parent, field, attention.ScaledDotProductAttention.Config())


def let_fsdp_add(modules: Iterable[nn.Module]) -> None:
    """Make FSDP reduce these modules' gradients with a plain sum, because gloo has no reduction that also divides."""
    for part in modules:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(enable=True)


def _cpu_module() -> SimpleNamespace:
    functions: dict[str, Any] = {name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")}
    own = {
        "set_device": lambda _device: None,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_name": lambda _device=None: "cpu",
        "get_device_properties": lambda _device=None: SimpleNamespace(total_memory=1),
        "memory_stats": lambda _device=None: {},
        "reset_peak_memory_stats": lambda _device=None: None,
        "empty_cache": lambda: None,
    }
    return SimpleNamespace(**{**functions, **own})


@contextlib.contextmanager
def torchtitan_on_cpu(titan: Any) -> Iterator[None]:
    """Inside the context, torchtitan trains on the CPU. `titan` is its module that defines `Trainer`."""
    from torchtitan.distributed import utils  # type: ignore[import-not-found, unused-ignore]

    no_sleep = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _seconds: None)
    modules = [module for name, module in sys.modules.items() if name.startswith("torchtitan.") and module is not None]
    with contextlib.ExitStack() as stack:
        stack.callback(gc.enable)  # torchtitan collects garbage itself
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(mock.patch.object(utils, "set_pg_timeouts"))
        stack.enter_context(mock.patch.object(titan, "time", no_sleep))
        for name, value in (("device_type", "cpu"), ("device_module", _cpu_module())):
            for module in modules:
                if name in vars(module):
                    stack.enter_context(mock.patch.object(module, name, value))
        yield
