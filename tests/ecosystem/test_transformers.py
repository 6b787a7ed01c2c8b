"""transformers: Llama, GPT-2, Mixtral and Qwen3 of two tiny layers, by torch's wrappers and by what the library applies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ecosystem import language, torchvision_operators  # noqa: F401 - first
from equivcheck import Outcome
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.verdict import UserVerdict
from equivcheck.worlds.trace.differences import Phase

transformers = pytest.importorskip("transformers")
distributed = pytest.importorskip("transformers.distributed.utils")
configuration = pytest.importorskip("transformers.distributed.configuration_utils")

SMALL = {
    "vocab_size": language.VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}


def llama() -> nn.Module:
    """Grouped heads, RMS norms, rotary embeddings."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def gpt2() -> nn.Module:
    """Learned positions, a head tied to the embedding."""
    small = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=language.VOCABULARY, use_cache=False, **small, **dropout)
    )


def mixtral() -> nn.Module:
    """Two of four experts for each token; in one loop over experts, as the grouped kernel of CPU takes no float64."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, **experts))


def qwen3() -> nn.Module:
    """Norms of each head's queries and keys, which ranks of tensor parallelism share."""
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, head_dim=4))


def in_ddp(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """As torch has it."""
    return DistributedDataParallel(model)


def by_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Each layer a unit of FSDP2."""
    for layer in model.transformer.h if hasattr(model, "transformer") else model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def own(**changes: Any) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    """What `from_pretrained(distributed_config=...)` applies, by the plans of the model."""

    def distribute(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        config = configuration.DistributedConfig(tp_size=sizes["tp"], fsdp_size=sizes["fsdp"], **changes)
        experts = ("pp", "dp_replicate", "efsdp", "ep")
        expert_mesh = init_device_mesh("cpu", (1, 1, config.efsdp_size, config.ep_size), mesh_dim_names=experts)
        return type(model).maybe_distribute_model(model, config, distributed.TransformersDeviceMesh(mesh, expert_mesh))

    return distribute


def axes(*, fsdp: int, tp: int) -> dict[str, int]:
    """A mesh with the axes of transformers."""
    return {"pp": 1, "dp_replicate": 1, "fsdp": fsdp, "tp": tp}


def training(**given: Any) -> dict[str, Any]:
    """Arguments of `check_training`."""
    usual = {"mesh": {"dp": 2}, "batches": language.batches(), "loss": language.next_token_loss, "optimizer": language.adamw}
    return usual | {"keep_dtype": True} | given


@pytest.mark.parametrize(
    ("layout", "given"),
    [
        ("Llama, DDP", {"model": llama, "parallelize": in_ddp}),
        ("Llama, FSDP2", {"model": llama, "parallelize": by_layers}),
        ("Llama, own FSDP plan", {"model": llama, "parallelize": own(), "mesh": axes(fsdp=2, tp=1)}),
        ("Llama, own TP plan", {"model": llama, "parallelize": own(), "mesh": axes(fsdp=1, tp=2)}),
        ("Llama, own FSDP plan x own TP plan", {"model": llama, "parallelize": own(), "mesh": axes(fsdp=2, tp=2)}),
        ("GPT-2, DDP", {"model": gpt2, "parallelize": in_ddp}),
        ("GPT-2, FSDP2", {"model": gpt2, "parallelize": by_layers}),
        ("Mixtral, DDP", {"model": mixtral, "parallelize": in_ddp}),
        ("Mixtral, own TP plan", {"model": mixtral, "parallelize": own(), "mesh": axes(fsdp=1, tp=2)}),
        ("Mixtral, own FSDP plan x own TP plan", {"model": mixtral, "parallelize": own(), "mesh": axes(fsdp=2, tp=2)}),
        (
            "Mixtral, own expert parallelism, float32",
            {
                "model": mixtral,
                "parallelize": own(ep_size=2),
                "mesh": axes(fsdp=2, tp=1),
                "dtype": torch.float32,
                "keep_dtype": False,
            },
        ),
        ("Qwen3, own TP plan", {"model": qwen3, "parallelize": own(), "mesh": axes(fsdp=1, tp=2)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_is_equivalent(checked: Callable[..., UserVerdict], layout: str, given: dict[str, Any]) -> None:
    """Ranks compute what one device computes, to the last digits of float64 but where said otherwise."""
    verdict = checked(layout, **training(**given))
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()


def test_a_norm_without_its_reduction(checked: Callable[..., UserVerdict]) -> None:
    """A plan of a user's that leaves out a norm which ranks apply to their heads: its gradient is each rank's own."""
    plan = {f"model.layers.*.self_attn.{name}_norm": "replicated_with_grad_allreduce" for name in "k"}

    def without_q(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        assert plan.items() <= model.tp_plan.items()
        model.tp_plan = {name: style for name, style in model.tp_plan.items() if not name.endswith("q_norm")}
        return own()(model, mesh)

    given = {"model": qwen3, "parallelize": without_q, "mesh": axes(fsdp=1, tp=2)}
    verdict = checked("wrong: Qwen3, TP plan without q_norm", **training(**given))
    assert verdict.divergence is not None, verdict.describe()
    assert (verdict.divergence.step, verdict.divergence.phase) == (0, Phase.GRADIENT)
    assert "q_norm" in verdict.divergence.tensor
    assert "ranks disagree" in verdict.describe()


def test_gradients_of_experts_that_fsdp2_divides_twice(checked: Callable[..., UserVerdict]) -> None:
    """In float64 torch divides by the factor that transformers sets both before and after a reduction over one rank."""
    given = {"model": mixtral, "parallelize": own(ep_size=2), "mesh": axes(fsdp=2, tp=1)}
    verdict = checked("torch's fault: Mixtral, own expert parallelism, float64", **training(**given))
    assert verdict.divergence is not None, verdict.describe()
    assert (verdict.divergence.step, verdict.divergence.phase) == (0, Phase.GRADIENT)
    assert "mlp.experts" in verdict.divergence.tensor
    assert verdict.kinds == (Cause.AVERAGED_TWICE,)


def test_a_mean_over_the_labels_of_a_rank(checked: Callable[..., UserVerdict]) -> None:
    """Labels that are left out make one rank's mean count for more than another's: the model's own loss, averaged by DDP."""

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, _loss: Any) -> torch.Tensor:
        optimizer.zero_grad()
        value = model(input_ids=batch[0], labels=batch[1]).loss
        value.backward()
        optimizer.step()
        return value

    labelled = [(tokens, tokens.clone()) for tokens, _ in language.batches()]
    for _, labels in labelled:
        labels[0, 3:] = -100
    verdict = checked(
        "wrong: Llama, DDP, mean over own labels", **training(model=llama, parallelize=in_ddp, batches=labelled, step=step)
    )
    assert verdict.divergence is not None, verdict.describe()
    assert (verdict.divergence.step, verdict.divergence.phase) == (0, Phase.LOSS)
    assert verdict.kinds == (Cause.MEAN_OF_MEANS,), verdict.describe()
