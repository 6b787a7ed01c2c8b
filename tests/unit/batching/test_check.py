"""Outcomes of checks in other batches, apart from right and wrong normalisers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from equivcheck import Outcome
from equivcheck.batching.check import check_batching
from unit.batching import steps
from unit.batching.reported_steps import REPORTED
from unit.batching.right_steps import BOTH, linear
from unit.batching.steps import Causal, losses, numbers, step_of, tokens
from unit.batching.wrong_steps import PER_MICROBATCH


def scaled_by_place(model: Any, batches: list[Any], optimizer: torch.optim.Optimizer, _loss: Any) -> None:
    """Mistake: later microbatches weigh more."""
    optimizer.zero_grad()
    for number, batch in enumerate(batches):
        (steps.squared(model, batch, batches) * (1.0 + 0.3 * number**2)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


class Transposed(Causal):
    """Logits with shape (rows, vocabulary, positions)."""

    def forward(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """Logits."""
        return super().forward(*arguments, **keywords).transpose(1, 2)


def transposed_loss(model: Any, batch: Any, _: Any) -> torch.Tensor:
    """Padding counts in the loss."""
    logits = model(batch["input_ids"], batch["attention_mask"])[..., :-1]
    return nn.functional.cross_entropy(logits, batch["input_ids"][:, 1:], reduction="sum")


@pytest.mark.parametrize(
    ("model", "step", "batch", "arguments"),
    [
        (lambda: nn.Linear(3, 1), scaled_by_place, numbers(1), {}),
        (Transposed, step_of(transposed_loss), tokens(), {}),
        (
            Causal,
            steps.token_mean,
            tokens(),
            {
                "microbatch_loss": ("router",),
                "evaluate": lambda model, batches: float(losses(model, batches[0]).sum() / batches[0]["labels"].numel()),
            },
        ),
    ],
    ids=["more examples than parameters", "positions in the last dim", "evaluation without splits"],
)
def test_an_unproved_cause_is_not_reported(model: Any, step: Any, batch: Any, arguments: dict[str, Any]) -> None:
    """Rather none than a wrong one."""
    verdict = check_batching(model=model, step=step, batch=batch, **arguments)
    assert (verdict.outcome, verdict.cause) == (Outcome.DIVERGED, ""), verdict


def test_windows_have_at_most_their_number_of_microbatches() -> None:
    """The full one is checked, and no arrangement has more microbatches."""
    verdict = check_batching(model=Causal, step=steps.token_mean, batch=tokens(), window=3)
    names = {result.name for result in verdict.results}
    assert "full window of 3 microbatches" in names
    assert "one row per microbatch" not in names


def test_texts_in_a_batch_are_not_split() -> None:
    """The verdict has a note."""
    verdict = check_batching(model=Causal, step=steps.token_mean, batch=tokens() | {"texts": ["a", "b", "c", "d"]})
    assert verdict.outcome is Outcome.EQUIVALENT
    assert verdict.notes == ("batch 'texts' has no tensors, so every arrangement gets it unchanged",)


def test_equal_counts_leave_two_causes() -> None:
    """A mean over tokens is one over examples."""
    batch = tokens()
    batch["labels"] = torch.where(torch.arange(steps.LENGTH) < 3, batch["input_ids"], steps.IGNORED)
    step = REPORTED["mean of microbatch means, clamped"][1]
    verdict = check_batching(model=Causal, step=step, batch=batch)
    assert f"mean over the counted tokens {PER_MICROBATCH}, or mean over the examples" in verdict.cause


def test_an_evaluation_may_be_zero() -> None:
    """An accuracy often is, before training."""
    verdict = check_batching(model=Causal, step=steps.token_mean, batch=tokens(), evaluate=lambda *_: 0.0)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict


def test_an_evaluation_that_fails_for_a_arrangement_crashed() -> None:
    """A batch without counted labels has no mean."""

    def evaluate(model: Any, batches: list[Any]) -> float:
        means = [float(losses(model, batch).sum()) / int(steps.count(batch)) for batch in batches]
        counts = [int(steps.count(batch)) for batch in batches]
        return sum(mean * number for mean, number in zip(means, counts, strict=True)) / sum(counts)

    verdict = check_batching(model=Causal, step=steps.token_mean, batch=tokens(), evaluate=evaluate)
    assert verdict.outcome is Outcome.CRASHED, verdict
    assert "evaluation, last microbatch without labels: ZeroDivisionError" in verdict.reason


def test_a_reference_that_rounding_decides_is_undecided() -> None:
    """Agreement proves nothing if gradients keep no digits."""

    def cancelled(model: Any, batch: Any, batches: list[Any]) -> torch.Tensor:
        value = steps.squared(model, batch, batches)
        return (1e13 * value).sin() * 1e-13

    verdict = check_batching(model=linear, step=step_of(cancelled), batch=numbers(3))
    assert verdict.outcome is Outcome.INCONCLUSIVE, verdict


def test_weights_of_examples_are_shown() -> None:
    """The verdict has the weights in the first differing arrangement and in the whole batch."""
    model, step, batch, arguments, _ = REPORTED["mean of microbatch means"]
    verdict = check_batching(model=model, step=step, batch=batch(), **arguments)
    assert verdict.counts == (7, 5, 7, 3)
    assert verdict.weights == "examples weigh 0.292, 0.208, 0.350, 0.150 instead of 0.318, 0.227, 0.318, 0.136"


def test_equal_counts_decide_nothing_about_the_normaliser() -> None:
    """With as many counted labels in each example, token and sequence means are the same."""
    batch = tokens()
    batch["labels"] = torch.where(torch.arange(steps.LENGTH) < 3, batch["input_ids"], steps.IGNORED)
    verdict = check_batching(model=Causal, step=steps.token_mean, batch=batch, normaliser="token")
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "all examples have 2 counted tokens" in verdict.reason


def test_a_step_without_update_decides_nothing() -> None:
    """Gradients may agree, but the optimizer never steps."""

    def step(model: Any, batches: list[Any], optimizer: torch.optim.Optimizer, _loss: Any) -> None:
        optimizer.zero_grad()
        for batch in batches:
            steps.squared(model, batch, batches).backward()  # type: ignore[no-untyped-call]

    verdict = check_batching(model=linear, step=step, batch=numbers(3))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "your optimizer never stepped" in verdict.reason


def test_a_step_that_fails_for_a_arrangement_crashed() -> None:
    """If it agrees otherwise."""

    def needs_two_rows(model: Any, batch: Any, batches: list[Any]) -> torch.Tensor:
        if len(batch[0]) == 1:
            raise ValueError("too few rows")
        return steps.squared(model, batch, batches)

    verdict = check_batching(model=linear, step=step_of(needs_two_rows), batch=numbers(3))
    assert verdict.outcome is Outcome.CRASHED
    assert "microbatches of 1 and 4 rows: ValueError: too few rows" in verdict.reason


def test_nan_in_a_model_that_casts_down_is_undecided() -> None:
    """An attention mask in float64 overflows in float32, so NaN is not the step's."""

    class Narrow(Causal):
        def forward(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
            lowest = torch.full((), torch.finfo(torch.float64).min, dtype=torch.float64)
            bias = torch.where(keywords["attention_mask"][:, :1] == 0, lowest, 0.0).float()
            return super().forward(*arguments, **keywords).float() + (bias * 0.0).unsqueeze(-1)

    arguments: dict[str, Any] = {"model": Narrow, "step": steps.token_mean, "batch": tokens(), **BOTH}
    verdict = check_batching(**arguments)
    assert verdict.outcome is Outcome.INCONCLUSIVE, verdict
    assert "keep_dtype=True" in verdict.reason


def test_a_collate_function_packs() -> None:
    """It gets examples without the dim for rows, and returns a batch."""
    seen: list[int] = []

    def collate(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        seen.append(len(examples))
        ids = torch.cat([each["input_ids"] for each in examples])
        labels = [torch.cat([torch.tensor([steps.IGNORED]), each["labels"][1:]]) for each in examples]
        positions = torch.cat([torch.arange(len(each["input_ids"])) for each in examples])
        return {"input_ids": ids[None], "labels": torch.cat(labels)[None], "position_ids": positions[None]}

    verdict = check_batching(model=Causal, step=steps.token_mean, batch=tokens(), packing=collate)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    assert steps.ROWS in seen
