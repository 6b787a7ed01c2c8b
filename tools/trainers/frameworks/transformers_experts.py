"""Configurations of transformers' expert parallelism, without a trainer."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from equivcheck import Outcome
from equivcheck.user.verdict import UserVerdict
from tools.trainers.frameworks.settings import check_in_float32
from tools.trainers.rows import Row

VERSIONS = {"5.16.1": "0.23.3", "5.17.0": "0.23.3", "5.18.0": "0.23.3"}
"""Versions, and the version of tokenizers that each takes. 5.24 takes OLMoE only with a tensor-parallel plan."""
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def model() -> nn.Module:
    """Two tiny layers of OLMoE on one device, which runs one expert after another."""
    transformers = import_module("transformers")
    config = transformers.OlmoeConfig(**SIZES, **EXPERTS, **TOKENS, num_key_value_heads=4, use_cache=False)
    built: nn.Module = transformers.OlmoeForCausalLM._from_config(config, experts_implementation="eager")
    return built


def distribute(built: nn.Module, mesh: Any, implementation: str) -> nn.Module:
    """Give each of two ranks half of the experts, as transformers does when it loads a model."""
    transformers = import_module("transformers")
    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(mesh.size())}
    folder = [tempfile.mkdtemp()]
    if dist.get_rank() == 0:
        built.save_pretrained(folder[0])  # type: ignore[operator]
    dist.broadcast_object_list(folder, src=0)
    config = import_module("transformers.distributed").DistributedConfig(enable_expert_parallel=True, tp_size=mesh.size())
    keywords = {"dtype": torch.float32, "distributed_config": config, "experts_implementation": implementation}
    loaded: nn.Module = transformers.OlmoeForCausalLM.from_pretrained(folder[0], **keywords)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return loaded


def check(implementation: str) -> UserVerdict:
    """Two updates on two ranks that see the same rows."""
    tokens = torch.randint(3, 32, (4, 8), generator=torch.Generator().manual_seed(0))
    return check_in_float32(
        model=model,
        parallelize=partial(distribute, implementation=implementation),
        mesh={"tp": 2},
        batches=[({"input_ids": tokens, "labels": tokens}, tokens)] * 2,
        loss=lambda outputs, _: outputs.loss,
    )


def expert_rows() -> Iterator[Row]:
    """Yield rows of versions before and after the repair of two public bugs."""
    known = {("5.16.1", "grouped_mm"): "#48205", ("5.16.1", "batched_mm"): "#48205, #48687", ("5.17.0", "batched_mm"): "#48687"}
    for version in VERSIONS:
        for implementation in ("grouped_mm", "batched_mm"):  # eager fails before 5.18
            report = known.get((version, implementation), "")
            yield Row(
                version=version,
                configuration=f"experts on 2 ranks, {implementation}",
                check=partial(check, implementation),
                expected=Outcome.DIVERGED if report else Outcome.EQUIVALENT,
                cause="step 0 gradient" if report else "",
                report=report,
            )
