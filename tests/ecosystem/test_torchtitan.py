"""torchtitan: its Llama 3 by its own `parallelize_llama`, with the sizes of a mesh and its mixed-precision policy in float64."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ecosystem import language, torchvision_operators  # noqa: F401 - first
from equivcheck import Outcome
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.verdict import UserVerdict

llama3 = pytest.importorskip("torchtitan.models.llama3", reason="torchtitan imports triton")

from torchtitan import config as settings  # noqa: E402 - where torchtitan can be imported
from torchtitan.distributed import ParallelDims, parallel_dims  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402

WIDTH = 16
settings.TORCH_DTYPE_MAP["float64"] = torch.float64


def degrees(*, dp: int = 1, tp: int = 1) -> Any:
    """Of each parallelism; activations as DTensors where tensor parallelism needs them."""
    return settings.ParallelismConfig(data_parallel_shard_degree=dp, tensor_parallel_degree=tp, spmd_backend="partial_dtensor")


def model(parallelism: Any) -> Callable[[], nn.Module]:
    """Two layers with the plan for these degrees; attention is that of torch, as the others run on CUDA or compiled."""

    def build() -> nn.Module:
        rotary = llama3.ComplexRoPE.Config(dim=WIDTH // 4, max_seq_len=language.LENGTH, theta=10_000, scaling="none")
        heads = {"n_heads": 4, "n_kv_heads": 2, "hidden_dim": 2 * WIDTH, "attn_backend": "flex", "fuse_qkv": False}
        layers = llama3._build_llama3_layers(n_layers=2, dim=WIDTH, rope=rotary, **heads)
        for layer in layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        config = llama3.Llama3Model.Config(
            dim=WIDTH,
            vocab_size=language.VOCABULARY,
            layers=layers,
            tok_embeddings=llama3.Embedding.Config(
                num_embeddings=language.VOCABULARY, embedding_dim=WIDTH, param_init=llama3._EMBEDDING_INIT
            ),
            norm=llama3.RMSNorm.Config(normalized_shape=WIDTH, param_init=llama3._NORM_INIT),
            lm_head=llama3.Linear.Config(
                in_features=WIDTH, out_features=language.VOCABULARY, param_init=llama3._output_linear_init(WIDTH)
            ),
        )
        config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
        built = config.build()
        built.init_states()
        return built

    return build


def applied(parallelism: Any) -> Callable[[nn.Module, DeviceMesh], None]:
    """By torchtitan, over meshes of its own on CPU."""

    def parallelize(built: nn.Module, mesh: DeviceMesh) -> None:
        dims = ParallelDims.from_config(parallelism, mesh.size())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parallel_dims, "device_type", "cpu")
            dims.build_mesh()
        llama3.parallelize_llama(
            built,
            parallel_dims=dims,
            training=settings.TrainingConfig(mixed_precision_param="float64", mixed_precision_reduce="float64"),
            parallelism=parallelism,
            compile_config=settings.CompileConfig(),
            ac_config=None,
            dump_folder="",
        )

    return parallelize


def shared(dp: int) -> Callable[..., torch.Tensor]:
    """A step that divides the loss by the number of data ranks, as torchtitan's trainer does: its FSDP adds gradients up."""

    def step(built: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Callable[..., torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(built(batch[0]), batch[1])
        (value / dp).backward()
        optimizer.step()
        return value

    return step


def training(parallelism: Any, **given: Any) -> dict[str, Any]:
    """Arguments of `check_training`."""
    sizes = {"dp": parallelism.data_parallel_shard_degree, "tp": parallelism.tensor_parallel_degree}
    usual = {
        "model": model(parallelism),
        "parallelize": applied(parallelism),
        "mesh": {name: size for name, size in sizes.items() if size > 1},
        "batches": language.batches(),
        "loss": language.next_token_loss,
        "optimizer": language.adamw,
        "rank_step": shared(sizes["dp"]),
        "keep_dtype": True,
    }
    return usual | given


@pytest.mark.parametrize(
    ("layout", "parallelism"),
    [
        ("Llama 3, FSDP2", degrees(dp=2)),
        ("Llama 3, TP with sequence parallelism", degrees(tp=2)),
        ("Llama 3, FSDP2 x TP", degrees(dp=2, tp=2)),
    ],
    ids=["fsdp2", "tp", "fsdp2 x tp"],
)
def test_parallelize_llama_is_equivalent(checked: Callable[..., UserVerdict], layout: str, parallelism: Any) -> None:
    """Ranks compute what one device computes."""
    verdict = checked(layout, **training(parallelism))
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()


def test_a_loss_that_is_a_mean_over_the_tokens_of_a_rank(checked: Callable[..., UserVerdict]) -> None:
    """The usual step: FSDP's own division is off, so that gradients are sums."""
    verdict = checked("wrong: Llama 3, FSDP2, mean over own tokens", **training(degrees(dp=2), rank_step=None))
    assert verdict.outcome is Outcome.DIVERGED, verdict.describe()
    assert Cause.SUMMED in verdict.kinds, verdict.describe()


@pytest.mark.parametrize("backend", ["spmd_types", "full_dtensor"])
def test_other_backends_need_its_trainer(backend: str) -> None:
    """They annotate or distribute activations in the trainer's own context, which is made for CUDA."""
    pytest.skip(f"{backend}: parameters or inputs are distributed by torchtitan's Trainer, which is no function of a model")
