"""Losses of verl and torchtitan over the same examples in other batches."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from torch import nn
from torch.nn import functional

from ecosystem.test_batching import IGNORED, LENGTH, ROWS, VOCABULARY, Batch, tokens
from equivcheck import Outcome, check_batching

pytestmark = pytest.mark.filterwarnings("ignore")
PER_MICROBATCH = "of each microbatch, then the mean over microbatches"


def build() -> nn.Module:
    """Model from tokens to logits."""
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))


def responses() -> Batch:
    """Rows with a mask of the response."""
    mask = (torch.arange(LENGTH) < torch.tensor([[7], [5], [10], [9]])).long()
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids * mask, "attention_mask": mask, "response_mask": mask * (torch.arange(LENGTH) > 1).long()}


def agg_loss() -> Any:
    """The function of verl, from its source, because the package imports an inference server and Ray."""
    found = importlib.util.find_spec("verl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("verl is not installed")
    folder = Path(next(iter(found.submodule_search_locations)))
    names: dict[str, Any] = {"torch": torch, "Optional": Optional}
    for path, name in (("utils/torch_functional.py", "masked_sum"), ("trainer/ppo/core_algos.py", "agg_loss")):
        module = ast.parse((folder / path).read_text("utf-8"))
        function = next(each for each in module.body if isinstance(each, ast.FunctionDef) and each.name == name)
        exec(compile(ast.Module([function], []), str(folder / path), "exec"), names)
        names["verl_F"] = SimpleNamespace(masked_sum=names["masked_sum"])
    return names["agg_loss"]


def verl_step(mode: str, *, is_global: bool) -> Any:
    """Step with verl's aggregation. `is_global`: with the counts of all microbatches, as its FSDP actor passes them."""
    aggregate = agg_loss()

    def step(model: Any, batches: list[Batch], optimizer: Any, _loss: Any) -> None:
        optimizer.zero_grad()
        counts = {
            "batch_num_tokens": sum(int(batch["response_mask"][:, 1:].sum()) for batch in batches),
            "global_batch_size": sum(len(batch["input_ids"]) for batch in batches),
        }
        for batch in batches:
            logits, mask = model(batch["input_ids"])[:, :-1], batch["response_mask"][:, 1:]
            own = functional.cross_entropy(logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
            loss = aggregate(own, mask, mode, **(counts if is_global else {}))
            (loss if is_global else loss / len(batches)).backward()
        optimizer.step()

    return step


@pytest.mark.parametrize(
    ("mode", "normaliser"), [("token-mean", "token"), ("token-sum", "none"), ("seq-mean-token-mean", "sequence")]
)
def test_verls_aggregation_with_counts_of_all_microbatches_is_right(mode: str, normaliser: str) -> None:
    """As since its version 0.6."""
    verdict = check_batching(model=build, step=verl_step(mode, is_global=True), batch=responses(), normaliser=normaliser)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict


@pytest.mark.parametrize(
    ("mode", "normaliser", "cause"),
    [
        ("token-mean", "token", f"mean over the counted tokens {PER_MICROBATCH}"),
        ("seq-mean-token-mean", "sequence", f"mean over the examples (each the mean over its tokens) {PER_MICROBATCH}"),
    ],
)
def test_verls_aggregation_without_counts_is_a_mean_over_a_microbatch(mode: str, normaliser: str, cause: str) -> None:
    """By definition: its defaults are for one microbatch."""
    verdict = check_batching(model=build, step=verl_step(mode, is_global=False), batch=responses(), normaliser=normaliser)
    assert verdict.outcome is Outcome.DIVERGED, verdict
    assert verdict.cause.startswith(cause)


def test_verls_normalised_token_sum_depends_on_padding() -> None:
    """By definition, unless loss_scale_factor is given: it divides by the length of the padded rows."""
    verdict = check_batching(model=build, step=verl_step("seq-mean-token-sum-norm", is_global=True), batch=responses())
    assert verdict.outcome is Outcome.DIVERGED, verdict
    assert verdict.cause.startswith("mean over the rows (each divided by its length minus one, padding included)")


def test_torchtitans_cross_entropy_is_right() -> None:
    """It divides the sum by the valid tokens of all microbatches."""
    loss = pytest.importorskip("torchtitan.components.loss")

    def step(model: Any, batches: list[Batch], optimizer: Any, _loss: Any) -> None:
        optimizer.zero_grad()
        function = loss.CrossEntropyLoss(loss.CrossEntropyLoss.Config())
        number = sum((batch["labels"][:, 1:] != IGNORED).sum() for batch in batches)
        for batch in batches:
            function(model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:].contiguous(), number)[0].backward()
        optimizer.step()

    verdict = check_batching(model=build, step=step, batch=tokens(), normaliser="token", keep_dtype=True)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
