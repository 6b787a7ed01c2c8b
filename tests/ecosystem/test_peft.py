"""peft: low-rank adapters in a Llama of transformers whose own parameters are frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ecosystem import language, torchvision_operators  # noqa: F401 - first
from equivcheck import Outcome
from equivcheck.user.verdict import UserVerdict
from equivcheck.worlds.trace.differences import Phase

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def adapted() -> nn.Module:
    """Adapters beside two projections, which begin at random values that reach the outputs."""
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=language.VOCABULARY, use_cache=False, **small))
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(base, adapters)


def in_ddp(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """Gradients of adapters averaged."""
    return DistributedDataParallel(model)


def by_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Each layer a unit of FSDP2, with parameters that are frozen and others that are not."""
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def initialised_on_ranks(model: nn.Module, mesh: DeviceMesh) -> None:
    """Adapters drawn on each rank, by its own generator, before they are sharded: FSDP2 takes rank 0's for no one else."""
    generator = torch.Generator().manual_seed(mesh.get_rank())
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.02, generator=generator)
    by_layers(model, mesh)


def training(**given: Any) -> dict[str, Any]:
    """Arguments of `check_training`."""
    usual = {"model": adapted, "mesh": {"dp": 2}, "batches": language.batches(), "loss": language.next_token_loss}
    return usual | {"optimizer": trainable, "keep_dtype": True} | given


def trainable(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The usual optimizer, of adapters alone."""
    return language.adamw([parameter for parameter in parameters if parameter.requires_grad])


@pytest.mark.parametrize(("layout", "parallelize"), [("LoRA, DDP", in_ddp), ("LoRA, FSDP2", by_layers)], ids=["ddp", "fsdp2"])
def test_adapters_are_equivalent(checked: Callable[..., UserVerdict], layout: str, parallelize: Any) -> None:
    """Two ranks train them as one device does, and leave the rest alone."""
    verdict = checked(layout, **training(parallelize=parallelize))
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()


def test_adapters_that_ranks_draw_themselves(checked: Callable[..., UserVerdict]) -> None:
    """Shards of different draws, from the first loss on."""
    verdict = checked("wrong: LoRA, FSDP2, adapters drawn on ranks", **training(parallelize=initialised_on_ranks))
    assert verdict.divergence is not None, verdict.describe()
    assert (verdict.divergence.step, verdict.divergence.phase) == (0, Phase.LOSS)
    assert "q_proj" in verdict.where, verdict.describe()
