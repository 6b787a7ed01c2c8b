"""Configurations of torchtitan's trainer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from equivcheck import Outcome
from equivcheck.user.trainers.torchtitan import TorchTitan
from equivcheck.user.verdict import UserVerdict
from tools.trainers.frameworks.settings import SETTINGS, check_in_float32
from tools.trainers.rows import REFUSED, Framework, Row

VERSION = "0.3.0"
WIDTH, VOCABULARY, LENGTH = 16, 32, 8
LAYOUTS = {
    "FSDP2": {"dp": 2},
    "HSDP": {"dp_replicate": 2, "dp": 2},
    "TP": {"tp": 2},
    "FSDP2 x TP": {"dp": 2, "tp": 2},
}


def two_layers() -> Any:
    """Llama 3 with two tiny layers."""
    llama = import_module("torchtitan.models.llama3")
    rotary = llama.ComplexRoPE.Config(dim=WIDTH // 4, max_seq_len=LENGTH, theta=10_000, scaling="none")
    sizes = {"n_layers": 2, "dim": WIDTH, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 2 * WIDTH}
    embedding = {"num_embeddings": VOCABULARY, "embedding_dim": WIDTH, "param_init": llama._EMBEDDING_INIT}
    head = {"in_features": WIDTH, "out_features": VOCABULARY, "param_init": llama._output_linear_init(WIDTH)}
    return llama.Llama3Model.Config(
        dim=WIDTH,
        vocab_size=VOCABULARY,
        layers=llama._build_llama3_layers(**sizes, rope=rotary, attn_backend="flex", fuse_qkv=False),
        tok_embeddings=llama.Embedding.Config(**embedding),
        norm=llama.RMSNorm.Config(normalized_shape=WIDTH, param_init=llama._NORM_INIT),
        lm_head=llama.Linear.Config(**head),
    )


def tiny_llama(limit: float = 0.0, backend: str = "partial_dtensor") -> Any:
    """A configuration, as functions of torchtitan's config registry return it."""
    titan, settings = import_module("torchtitan.trainer"), import_module("torchtitan.config")
    llama = import_module("torchtitan.models.llama3")
    spec = llama.ModelSpec(
        name="llama3",
        flavor="tiny",
        model=two_layers(),
        parallelize_fn=llama.parallelize_llama,
        pipelining_fn=llama.pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
    return titan.Trainer.Config(
        model_spec=spec,
        loss=import_module("torchtitan.components.loss").CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        optimizer=import_module("torchtitan.components.optimizer").default_adamw(lr=0.01),
        training=settings.TrainingConfig(max_norm=limit or float("inf")),
        parallelism=settings.ParallelismConfig(spmd_backend=backend),
        activation_checkpoint=None,
    )


def batches(num_microbatches: int) -> list[Any]:
    """Two updates. Rows have different numbers of labels that count."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(2 * num_microbatches):
        tokens = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        for row in range(4):
            labels[row, : (3 * row + 2 * number) % 7] = -100
        made.append((tokens[:, :-1].clone(), labels))
    return [made[:num_microbatches], made[num_microbatches:]]


def token_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over labels."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def check(mesh: dict[str, int], num_microbatches: int, *config: Any, trainer: Any = None) -> UserVerdict:
    """Two updates."""
    titan = TorchTitan(config=partial(tiny_llama, *config), trainer=None if trainer is None else trainer())
    return check_in_float32(
        model=titan.model,
        trainer=titan,
        mesh=mesh,
        batches=batches(num_microbatches),
        loss=token_loss,
    )


def divides_by_own_labels() -> Any:
    """A trainer with a mistake: each rank divides by the labels in its own microbatch."""
    titan = import_module("torchtitan.trainer")

    class OwnLabels(titan.Trainer):  # type: ignore[misc, name-defined]
        """A user's trainer."""

        def forward_backward_step(self, *, input_dict: Any, labels: Any, global_valid_tokens: Any) -> Any:
            """Ignore the number of labels over all ranks and microbatches."""
            own = (labels != -100).sum() + 0 * global_valid_tokens
            return super().forward_backward_step(input_dict=input_dict, labels=labels, global_valid_tokens=own)

    return OwnLabels


def _rows() -> Iterator[Row]:
    row = partial(Row, version=VERSION)
    for layout, mesh in LAYOUTS.items():
        for name, (number, limit) in SETTINGS.items():
            yield row(configuration=f"{layout}, {name}", check=partial(check, mesh, number, limit))
    wrong: dict[str, Any] = {"expected": Outcome.DIVERGED, "cause": "2 times as large"}
    yield row(configuration="FSDP2, full_dtensor on torch 2.13", check=partial(check, {"dp": 2}, 1, 0.0, "full_dtensor"), **wrong)
    older: dict[str, Any] = {"expected": REFUSED, "cause": "needs a newer torch"}
    yield row(configuration="FSDP2, spmd_types on torch 2.13", check=partial(check, {"dp": 2}, 1, 0.0, "spmd_types"), **older)
    yield row(configuration="pipeline on torch 2.13", check=partial(check, {"pp": 2}, 1), **older)
    yield row(
        configuration="planted: divides by own labels, FSDP2, 3 microbatches",
        check=partial(check, {"dp": 2}, 3, trainer=divides_by_own_labels),
        expected=Outcome.DIVERGED,
        cause="step 0 loss",
    )


TORCHTITAN = Framework(
    name="torchtitan",
    versions={VERSION: (f"torchtitan=={VERSION}", "tokenizers==0.23.3", "spmd_types==0.2.3", "torch_checkpointing==0.1.1")},
    rows=(*_rows(),),
)
