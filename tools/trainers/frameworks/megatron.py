"""Configurations of megatron-core."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from equivcheck import Outcome
from equivcheck.user.trainers.megatron import MegatronCore
from equivcheck.user.verdict import UserVerdict
from tools.trainers.frameworks.megatron_gpt import GATED, MIXTURE, SIZES, Gpt, batches, megatron_gpt, next_token_loss
from tools.trainers.frameworks.settings import check_in_float32, rows_of_layouts
from tools.trainers.rows import Framework, Row

VERSION = "0.16.1"
KINDS: dict[str, dict[str, Any]] = {"gelu": {}, "gated": GATED, "mixture": MIXTURE}
"""Fields of `TransformerConfig` for each kind of layers."""
SHARDED = {"use_distributed_optimizer": True}
SEQUENCE = {"sequence_parallel": True}
EXPERTS = {"expert_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[str, dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "DDP": ("gelu", {"dp": 2}, {}, {}),
    "distributed optimizer": ("gated", {"dp": 2}, {}, SHARDED),
    "distributed optimizer, overlap": ("gelu", {"dp": 2}, {}, SHARDED | {"overlap_grad_reduce": True, "bucket_size": 1000}),
    "TP": ("gelu", {"tp": 2}, {}, {}),
    "TP, gated": ("gated", {"tp": 2}, {}, {}),
    "sequence parallel": ("gelu", {"tp": 2}, SEQUENCE, {}),
    "DP x sequence parallel, distributed optimizer": ("gated", {"dp": 2, "tp": 2}, SEQUENCE, SHARDED),
    "PP": ("gelu", {"pp": 2}, {}, {}),
    "PP x DP, distributed optimizer": ("gelu", {"pp": 2, "dp": 2}, {}, SHARDED),
    "experts": ("mixture", {"dp": 2}, {}, {}),
    "expert parallel": ("mixture", {"dp": 2}, EXPERTS, {}),
    "expert parallel, distributed optimizer": ("mixture", {"dp": 2}, EXPERTS, SHARDED),
}
"""Kind of layers, mesh, and fields of `TransformerConfig` and `DistributedDataParallelConfig`."""


def check(layout: str, num_microbatches: int, limit: float, build: Any = megatron_gpt) -> UserVerdict:
    """Two updates."""
    kind, mesh, fields, ddp = LAYOUTS[layout]
    transformer = SIZES | KINDS[kind] | fields
    return check_in_float32(
        model=partial(Gpt, kind),
        trainer=MegatronCore(build=build, transformer=transformer, ddp=ddp, optimizer={"clip_grad": limit}),
        mesh=mesh,
        batches=batches(num_microbatches),
        loss=next_token_loss,
    )


def with_norms_of_own_tokens(config: Any, **stage: bool) -> nn.Module:
    """Remove the mark that lets Megatron sum the gradients of norms."""
    built = megatron_gpt(config, **stage)
    for module in built.modules():
        if isinstance(module, nn.LayerNorm):
            for parameter in module.parameters():
                parameter.sequence_parallel = False  # type: ignore[attr-defined]
    return built


def _rows() -> Iterator[Row]:
    yield from rows_of_layouts(VERSION, LAYOUTS, check)
    yield Row(
        version=VERSION,
        configuration="planted: norms without the mark, sequence parallel",
        check=partial(check, "sequence parallel", 3, 0.0, with_norms_of_own_tokens),
        expected=Outcome.DIVERGED,
        cause="are not summed over the 2 tp ranks",
    )


MEGATRON = Framework(name="megatron-core", versions={VERSION: (f"megatron-core=={VERSION}",)}, rows=(*_rows(),))
