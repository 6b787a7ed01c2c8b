"""megatron-core on two to four ranks, by the version that is installed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from equivcheck import Outcome, UsageError, check_training
from equivcheck.user.trainers.megatron import MegatronCore
from equivcheck.user.verdict import UserVerdict
from frameworks.pages import shown_output
from tools.trainers.frameworks.megatron_gpt import GATED, MIXTURE, SIZES, Gpt, batches, megatron_gpt, next_token_loss

pytest.importorskip("megatron.core")

KINDS: dict[str, dict[str, Any]] = {"gelu": {}, "gated": GATED, "mixture": MIXTURE}
SHARDED = {"use_distributed_optimizer": True}


def checked(kind: str, mesh: dict[str, int], num_microbatches: int = 3, limit: float = 0.0, **fields: Any) -> UserVerdict:
    """Two updates."""
    transformer = SIZES | KINDS[kind] | fields.get("transformer", {})
    optimizer = {"clip_grad": limit, **fields.get("optimizer", {})}
    given: dict[str, Any] = {
        "model": partial(Gpt, kind),
        "trainer": MegatronCore(
            build=fields.get("build", megatron_gpt), transformer=transformer, ddp=fields.get("ddp", {}), optimizer=optimizer
        ),
        "mesh": mesh,
        "batches": batches(num_microbatches),
        "loss": next_token_loss,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "dtype": torch.float32,
        "world": "gloo",
    }
    return check_training(**given | fields.get("arguments", {}))


SEQUENCE = {"sequence_parallel": True}
EXPERTS = {"expert_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[str, dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "ddp": ("gelu", {"dp": 2}, {}, {}),
    "distributed optimizer": ("gated", {"dp": 2}, {}, SHARDED),
    "distributed optimizer, overlap": ("gelu", {"dp": 2}, {}, SHARDED | {"overlap_grad_reduce": True, "bucket_size": 1000}),
    "tp": ("gelu", {"tp": 2}, {}, {}),
    "tp, gated": ("gated", {"tp": 2}, {}, {}),
    "sequence parallel": ("gelu", {"tp": 2}, SEQUENCE, {}),
    "dp x sequence parallel, distributed optimizer": ("gated", {"dp": 2, "tp": 2}, SEQUENCE, SHARDED),
    "pp": ("gelu", {"pp": 2}, {}, {}),
    "pp x dp, distributed optimizer": ("gelu", {"pp": 2, "dp": 2}, {}, SHARDED),
    "experts": ("mixture", {"dp": 2}, {}, {}),
    "expert parallel": ("mixture", {"dp": 2}, EXPERTS, {}),
    "expert parallel, distributed optimizer": ("mixture", {"dp": 2}, EXPERTS, SHARDED),
}


@pytest.mark.parametrize(("num_microbatches", "limit"), [(1, 0.0), (3, 0.0), (3, 0.1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_equivalent(layout: str, num_microbatches: int, limit: float) -> None:
    """With accumulation and clipping."""
    kind, mesh, transformer, ddp = LAYOUTS[layout]
    verdict = checked(kind, mesh, num_microbatches, limit, transformer=transformer, ddp=ddp)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    assert not verdict.unread


def with_norms_of_own_tokens(config: Any, **stage: bool) -> nn.Module:
    """A mistake: under sequence parallelism, gradients of norms must be summed, and Megatron sums those that are marked."""
    built = megatron_gpt(config, **stage)
    for module in built.modules():
        if isinstance(module, nn.LayerNorm):
            for parameter in module.parameters():
                parameter.sequence_parallel = False
    return built


def test_norms_that_are_not_marked_sequence_parallel() -> None:
    """Each rank has the gradient over its own tokens."""
    verdict = checked("gelu", {"tp": 2}, transformer=SEQUENCE, build=with_norms_of_own_tokens)
    assert verdict.outcome is Outcome.DIVERGED, verdict
    assert verdict.cause == shown_output("trainer_megatron"), verdict


@pytest.mark.parametrize(
    ("mesh", "fields", "words"),
    [
        ({"dp": 2}, {"arguments": {"world": "sim"}}, "trainer MegatronCore is not valid: it needs processes"),
        ({"dp": 2}, {"transformer": {"bf16": True}}, "trainer MegatronCore is not valid: its bf16 needs a GPU"),
        ({"dp": 2}, {"optimizer": {"optimizer": "muon"}}, "trainer MegatronCore is not valid: its optimizer keeps state"),
        ({"tp": 2, "dp": 2}, {}, "mesh is not valid: its axes tp, dp are in another order than Megatron's"),
        ({"dp": 2}, {"arguments": {"model": partial(Gpt, "gated")}}, "model is not valid: it has no parameter like Megatron's"),
        ({"dp": 2}, {"arguments": {"dtype": torch.float64}}, "dtype torch.float64 is not valid"),
    ],
)
def test_bad_input_is_one_line(mesh: dict[str, int], fields: dict[str, Any], words: str) -> None:
    """It names the argument and the expected value."""
    with pytest.raises(UsageError) as raised:
        checked("gelu", mesh, **fields)
    assert str(raised.value).startswith(f"check_training: {words}")
    assert "Expected " in str(raised.value)
