"""TRL's trainers on two ranks, by the version that is installed."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch

with contextlib.suppress(ModuleNotFoundError):
    from ecosystem import torchvision_operators  # noqa: F401 - before transformers

from equivcheck import Outcome, UsageError, check_training
from equivcheck.user.trainers.trl import TRL
from equivcheck.user.trainers.trl_losses import grpo_loss, sft_loss
from equivcheck.user.verdict import UserVerdict
from equivcheck.worlds.trace.differences import Phase
from frameworks.pages import shown_output
from tools.trainers.frameworks.trl import LOSSES, Drawn, model

pytest.importorskip("transformers")
trl = pytest.importorskip("trl")


def checked(kind: Any, num_microbatches: int = 3, limit: float = 0.0, **options: Any) -> UserVerdict:
    """Two updates on two ranks."""
    drawn = Drawn(is_even=options.pop("is_even", False))
    arguments = options.pop("arguments", {})
    given: dict[str, Any] = {
        "model": partial(model, kind),
        "trainer": TRL(kind=kind, arguments={"max_grad_norm": limit, **arguments}),
        "mesh": {"dp": 2},
        "batches": [[drawn.batch(kind) for _ in range(num_microbatches)] for _ in range(2)],
        "loss": LOSSES.get(kind, sft_loss),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "dtype": torch.float32,
        "world": "gloo",
    }
    return check_training(**given | options)


@pytest.mark.parametrize(("num_microbatches", "limit"), [(1, 0.0), (3, 0.0), (3, 0.1)])
@pytest.mark.parametrize("kind", LOSSES)
def test_trainers_are_equivalent(kind: str, num_microbatches: int, limit: float) -> None:
    """With accumulation and clipping."""
    verdict = checked(kind, num_microbatches, limit)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    assert not verdict.unread


def test_grpo_with_means_over_rows() -> None:
    """Its first loss."""
    verdict = checked("GRPO", arguments={"loss_type": "grpo"}, loss=partial(grpo_loss, mean_over="rows"))
    assert verdict.outcome is Outcome.EQUIVALENT, verdict


def test_labels_that_count_by_rank() -> None:
    """A mistake in the configuration: ranks with fewer labels weigh them more."""
    verdict = checked("SFT", arguments={"average_tokens_across_devices": False})
    assert verdict.divergence is not None, verdict
    assert verdict.divergence.phase is Phase.LOSS


class MeanOfMicrobatch(trl.SFTTrainer):  # type: ignore[misc, name-defined]
    """A mistake: the trainer does not divide by the number of microbatches if it passes the number of labels."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """Average over this microbatch's labels only."""
        return super().compute_loss(model, inputs, return_outputs, None)


def test_a_subclass_that_ignores_the_number_of_labels() -> None:
    """Its gradient is a sum."""
    verdict = checked("SFT", trainer=TRL(kind="SFT", trainer=MeanOfMicrobatch, arguments={"max_grad_norm": 0.0}), is_even=True)
    assert verdict.outcome is Outcome.DIVERGED, verdict
    assert verdict.cause == shown_output("trainer_trl"), verdict


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("SFT", {"world": "sim"}, "trainer TRL is not valid: it needs processes"),
        ("SFT", {"arguments": {"bf16": True}}, "trainer TRL is not valid: its bf16 or fp16 rounds at other points"),
        ("KTO", {}, "trainer TRL with kind 'KTO' is not valid: there is no adapter for it"),
    ],
)
def test_bad_input_is_one_line(kind: str, options: dict[str, Any], words: str) -> None:
    """It names the argument and the expected value."""
    with pytest.raises(UsageError) as raised:
        checked(kind, **options)
    assert str(raised.value).startswith(f"check_training: {words}")
