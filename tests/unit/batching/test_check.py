"""A right step agrees in all presentations. A wrong one does not, and its cause is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from equivcheck import Outcome
from equivcheck.batching.check import check_batching
from equivcheck.batching.presentations import Kind
from unit.batching import steps
from unit.batching.steps import Causal, Normed, losses, numbers, step_of, summed, tokens

BOTH = {"padding_side": ("right", "left")}
PACKED = {"packing": "position_ids"}


def linear() -> nn.Module:
    """A model for rows of three numbers."""
    return nn.Linear(3, 3)


@pytest.mark.parametrize(
    ("model", "step", "batch", "arguments", "normaliser"),
    [
        (Causal, steps.token_mean, tokens(), {"normaliser": "token", **PACKED}, "mean over the counted tokens of all"),
        (Causal, steps.token_mean, tokens(), {"packing": "document_ids"}, "mean over the counted tokens of all"),
        (Causal, steps.sequence_mean, tokens(), {"normaliser": "sequence"}, "mean over the examples"),
        (Causal, steps.token_sum, tokens(), {"normaliser": "none"}, "sum over the counted tokens"),
        (Causal, steps.token_mean, tokens(), {"normaliser": "token", "window": 3}, "mean over the counted tokens"),
        (Causal, steps.token_mean, tokens(), {"normaliser": "token", "microbatches": "even"}, "mean over the counted tokens"),
        (Causal, steps.token_mean, tokens(), {"normaliser": "token", "evaluate": steps.evaluate}, "mean over the counted tokens"),
        (Causal, steps.with_router(lambda batches: 1 / len(batches)), tokens(), {"microbatch_loss": ("router",)}, ""),
        (linear, steps.weighted(of_all=True), numbers(3, with_weights=True), {}, "weighted"),
        (linear, step_of(steps.squared), numbers(3), {}, "mean over"),
        (linear, step_of(steps.squared), numbers(3), {"normaliser": "sequence"}, "mean over"),
        (Causal, step_of(steps.translation), steps.translations(), {"normaliser": "token"}, "mean over the counted tokens"),
        (Causal, step_of(steps.masked), steps.completions(), {"normaliser": "token"}, "mean over the labels before the shift"),
        (linear, step_of(steps.contrastive), numbers(3), {"microbatch_loss": ("negatives",)}, ""),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_right_step_is_equivalent(  # noqa: PLR0913, PLR0917 - columns of the table
    model: Any, step: Any, batch: Any, arguments: dict[str, Any], normaliser: str, dtype: torch.dtype
) -> None:
    """In every presentation, far within tolerance, and the verdict names the normaliser."""
    verdict = check_batching(model=model, step=step, batch=batch, dtype=dtype, **arguments)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    assert verdict.worst_error < 0.7
    assert verdict.normaliser.startswith(normaliser) or normaliser in verdict.normaliser


PER_MICROBATCH = "of each microbatch, then the mean over microbatches"
WRONG: dict[str, tuple[Any, Any, Any, dict[str, Any], Kind | None, str]] = {
    "mean of means": (
        Causal,
        step_of(lambda model, batch, batches: losses(model, batch).sum() / steps.count(batch) / len(batches)),
        tokens(),
        {"normaliser": "token"},
        Kind.SPLIT,
        f"mean over the counted tokens {PER_MICROBATCH}",
    ),
    "mean of means, clamped": (
        Causal,
        step_of(lambda model, batch, batches: losses(model, batch).sum() / steps.count(batch).clamp(min=1) / len(batches)),
        tokens(),
        {"normaliser": "token"},
        Kind.SPLIT,
        f"mean over the counted tokens {PER_MICROBATCH}",
    ),
    "sum of means": (
        Causal,
        step_of(lambda model, batch, _: losses(model, batch).sum() / steps.count(batch).clamp(min=1)),
        tokens(),
        {"normaliser": "token"},
        Kind.SPLIT,
        "mean over the counted tokens of each microbatch, then the sum over microbatches",
    ),
    "divided twice": (
        Causal,
        step_of(lambda model, batch, batches: losses(model, batch).sum() / summed(steps.count, batches) / len(batches)),
        tokens(),
        {"normaliser": "token"},
        Kind.SPLIT,
        "of all microbatches, then divided by the number of microbatches",
    ),
    "divided by the window": (
        Causal,
        step_of(lambda model, batch, _: losses(model, batch).sum() / steps.count(batch).clamp(min=1) / steps.WINDOW),
        tokens(),
        {"normaliser": "token", "window": steps.WINDOW},
        Kind.SPLIT,
        "of each microbatch, then divided by the window",
    ),
    "short window": (
        Causal,
        steps.steps_after_full_window,
        tokens(),
        {"window": steps.WINDOW},
        Kind.SPLIT,
        "the optimizer makes no step with 1 microbatch",
    ),
    "zero_grad": (Causal, steps.without_earlier_gradients, tokens(), {}, Kind.SPLIT, "gradients of the last one only"),
    "all positions": (
        Causal,
        step_of(lambda model, batch, batches: losses(model, batch).sum() / summed(steps.num_positions, batches)),
        tokens(),
        {"normaliser": "token"},
        Kind.SPLIT,
        "mean over the positions, padding included, of all microbatches",
    ),
    "before the shift": (
        Causal,
        step_of(
            lambda model, batch, batches: (
                losses(model, batch).sum() / summed(lambda each: (each["labels"] != steps.IGNORED).sum(), batches)
            )
        ),
        tokens(),
        {"normaliser": "token"},
        None,
        "mean over the labels before the shift of all microbatches",
    ),
    "rows": (
        Causal,
        step_of(lambda model, batch, batches: losses(model, batch).sum() / summed(steps.num_rows, batches)),
        tokens(),
        {"normaliser": "sequence"},
        None,
        "sum over the counted tokens, divided by the number of rows of all microbatches",
    ),
    "sequence, not token": (Causal, steps.sequence_mean, tokens(), {"normaliser": "token"}, None, "mean over the examples"),
    "token, not sequence": (Causal, steps.token_mean, tokens(), {"normaliser": "sequence"}, None, "mean over the counted tokens"),
    "packed rows": (
        Causal,
        steps.sequence_mean,
        tokens(),
        {"normaliser": "sequence", **PACKED},
        Kind.PACKED,
        "mean over the rows",
    ),
    "documents attend": (
        lambda: Causal(separates_documents=False),
        steps.token_mean,
        tokens(),
        PACKED,
        Kind.PACKED,
        "packed documents attend to each other",
    ),
    "positions run on": (
        lambda: Causal(resets_positions=False),
        steps.token_mean,
        tokens(),
        PACKED,
        Kind.PACKED,
        "positions run on in packed documents",
    ),
    "label over the border": (
        Causal,
        step_of(steps.label_over_border),
        tokens(),
        PACKED,
        Kind.PACKED,
        "a label over the border of packed documents counts",
    ),
    "first token from padding": (
        Causal,
        steps.token_mean,
        tokens(),
        BOTH,
        Kind.PADDED,
        "with padding on the left, the label of an example's first token counts",
    ),
    "mask ignored": (
        lambda: Causal(uses_mask=False),
        steps.token_mean,
        tokens(),
        BOTH,
        Kind.PADDED,
        "the model attends to padding",
    ),
    "padding counts": (
        Causal,
        step_of(
            lambda model, batch, batches: losses(model, batch, batch["input_ids"]).sum() / summed(steps.num_positions, batches)
        ),
        tokens(),
        {},
        Kind.SPLIT,
        "padding counts in the loss",
    ),
    "shared term": (
        Causal,
        steps.with_router(lambda batches: 1 / len(batches)),
        tokens(),
        {},
        Kind.SPLIT,
        "rows in a microbatch share a loss term",
    ),
    "router not averaged": (
        Causal,
        steps.with_router(lambda _: 1.0),
        tokens(),
        {"normaliser": "token", "microbatch_loss": ("router",)},
        Kind.TWICE,
        "each microbatch adds a loss term that is not divided by the number of microbatches",
    ),
    "negatives": (linear, step_of(steps.contrastive), numbers(3), {}, Kind.SPLIT, "rows in a microbatch share a loss term"),
    "weights of a microbatch": (
        linear,
        steps.weighted(of_all=False),
        numbers(3, with_weights=True),
        {},
        Kind.SPLIT,
        f"mean over the rows, weighted by their number in the batch, {PER_MICROBATCH}",
    ),
    "batch norm": (Normed, step_of(steps.squared), numbers(), {}, Kind.SPLIT, "'norm' normalises over a microbatch's rows"),
    "evaluation": (
        Causal,
        steps.token_mean,
        tokens(),
        {"evaluate": steps.evaluate_means},
        Kind.SPLIT,
        "the evaluation averages the batches' results",
    ),
    "last loss returned": (
        Causal,
        steps.returns_last_loss,
        tokens(),
        {"normaliser": "token"},
        Kind.SPLIT,
        "gradients and parameters agree: only the loss that your step returns differs",
    ),
    "no label": (
        Causal,
        step_of(
            lambda model, batch, batches: (
                steps.masked(model, batch, batches) * (batch["completion_mask"].sum() / batch["completion_mask"].sum())
            )
        ),
        steps.completions(),
        {"normaliser": "token"},
        Kind.BLANK,
        "a microbatch without counted labels makes gradients NaN",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_step_diverges_with_its_cause(name: str) -> None:
    """The first presentation that differs has the kind that shows the mistake."""
    model, step, batch, arguments, kind, cause = WRONG[name]
    verdict = check_batching(model=model, step=step, batch=batch, **arguments)
    assert verdict.outcome is Outcome.DIVERGED, verdict
    first = next((result for result in verdict.results if result.divergence is not None), None)
    assert (None if first is None else first.kind) is kind
    assert cause in verdict.cause
    assert verdict.cause in str(verdict).replace("\n         ", " ")


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
    """The full one is checked, and no presentation has more microbatches."""
    verdict = check_batching(model=Causal, step=steps.token_mean, batch=tokens(), window=3)
    names = {result.name for result in verdict.results}
    assert "full window of 3 microbatches" in names
    assert "one row per microbatch" not in names


def test_texts_in_a_batch_are_not_split() -> None:
    """The verdict has a note."""
    verdict = check_batching(model=Causal, step=steps.token_mean, batch=tokens() | {"texts": ["a", "b", "c", "d"]})
    assert verdict.outcome is Outcome.EQUIVALENT
    assert verdict.notes == ("batch 'texts' has no tensors, so every presentation gets it unchanged",)


def test_equal_counts_leave_two_causes() -> None:
    """A mean over tokens is one over examples."""
    batch = tokens()
    batch["labels"] = torch.where(torch.arange(steps.LENGTH) < 3, batch["input_ids"], steps.IGNORED)
    step = WRONG["mean of means, clamped"][1]
    verdict = check_batching(model=Causal, step=step, batch=batch)
    assert f"mean over the counted tokens {PER_MICROBATCH}, or mean over the examples" in verdict.cause


def test_an_evaluation_may_be_zero() -> None:
    """An accuracy often is, before training."""
    verdict = check_batching(model=Causal, step=steps.token_mean, batch=tokens(), evaluate=lambda *_: 0.0)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict


def test_an_evaluation_that_fails_for_a_presentation_crashed() -> None:
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
    """The verdict has the weights in the first differing presentation and in the whole batch."""
    model, step, batch, arguments, _, _ = WRONG["mean of means"]
    verdict = check_batching(model=model, step=step, batch=batch, **arguments)
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


def test_a_step_that_fails_for_a_presentation_crashed() -> None:
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
