"""A batch is taken apart and put together without a change, and unclear tensors are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from equivcheck import Outcome, UsageError
from equivcheck.arrangements.examples import examples_of
from equivcheck.arrangements.fields import Role
from equivcheck.arrangements.format import Format, format_of
from equivcheck.arrangements.rows import Example, Rows, Side
from equivcheck.batching.check import check_batching
from unit.batching import steps
from unit.batching.steps import Causal, numbers, tokens

IDS = torch.arange(1, 13).reshape(3, 4)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])


def read(batch: Any, **arguments: Any) -> Format:
    """The batch's form."""
    defaults: dict[str, Any] = {"fields": {}, "pad_id": 0, "ignore_index": -100, "packing": None}
    return format_of(batch, **defaults | arguments)


@pytest.mark.parametrize(
    ("batch", "roles"),
    [
        ({"input_ids": IDS, "labels": IDS, "attention_mask": MASK}, "tokens labels mask"),
        ((IDS, IDS), "tokens labels"),
        ((IDS, IDS.roll(-1, 1)), "tokens labels"),
        ((IDS, MASK, torch.where(IDS > 3, IDS, -100)), "tokens mask labels"),
        ({"input_ids": IDS, "completion_mask": MASK, "advantages": torch.randn(3)}, "tokens loss_mask row"),
        ({"tokens": IDS, "position_ids": IDS, "weights": torch.randn(3, 4)}, "tokens positions token"),
        ({"prompt_ids": IDS, "completion_ids": IDS, "rewards": torch.randn(3)}, "tokens tokens row"),
        ((torch.randn(3, 4), torch.randn(3, 2)), "row row"),
        (({"input_ids": IDS}, torch.zeros(3, dtype=torch.long)), "tokens row"),
        (torch.randn(3, 4), "row"),
        ((torch.randn(3, 4), torch.ones(3, 5, dtype=torch.long)), "row row"),
    ],
)
def test_roles_follow_from_names_shapes_and_values(batch: Any, roles: str) -> None:
    """The usual forms of batches need no words from the user."""
    assert [field.role.value for field in read(batch).fields] == roles.split()


def test_given_roles_win() -> None:
    """A tensor's path has dots."""
    batch = {"input_ids": IDS, "extra": {"numbers": torch.randn(3, 4)}}
    assert [field.role for field in read(batch, fields={"extra.numbers": "row"}).fields] == [Role.TOKENS, Role.ROW]


def equal(one: Any, other: Any) -> bool:
    """Whether two batches have the same tensors."""
    return all(torch.equal(one[name], other[name]) for name in {*one, *other})


@pytest.mark.parametrize("side", list(Side))
def test_examples_put_together_are_the_batch(side: Side) -> None:
    """Padded on the same side, with the same numbers of counted labels."""
    mask = MASK if side is Side.RIGHT else MASK.flip(1)
    batch = {"input_ids": torch.where(mask == 1, IDS, 0), "labels": torch.where(mask == 1, IDS, -100), "attention_mask": mask}
    given = read(batch)
    examples = examples_of(given)
    assert given.default_side is side
    assert [example.length for example in examples] == [4, 2, 3]
    assert [example.num_counted for example in examples] == [3, 1, 2]
    assert equal(given.microbatch(Rows(rows=tuple((each,) for each in examples), side=side)), batch)


def test_rows_of_equal_length_are_cut() -> None:
    """To unequal ones with at least one counted label."""
    examples = examples_of(read(tokens()))
    assert len({example.length for example in examples}) == len(examples)
    assert len({example.num_counted for example in examples}) > 1
    assert min(example.num_counted for example in examples) >= 1


def packed(given: Format, examples: tuple[Example, ...]) -> Any:
    """All examples in one row, padded by one."""
    return given.microbatch(Rows(rows=(examples,), extra=1))


def test_packed_documents_have_boundaries() -> None:
    """Positions start again, and no document's first label counts, because the model would predict it from the one before."""
    batch = {"input_ids": IDS, "labels": IDS, "attention_mask": MASK}
    given = read(batch, packing="position_ids")
    found = packed(given, examples_of(given))
    assert found["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2, 0]]
    assert found["labels"].tolist() == [[1, 2, 3, 4, -100, 6, -100, 10, 11, -100]]
    assert "attention_mask" not in found
    assert packed(read(batch, packing="document_ids"), examples_of(given))["document_ids"].tolist() == [
        [0, 0, 0, 0, 1, 1, 2, 2, 2, 3]
    ]
    lengths = read(batch, packing="cu_seqlens")
    found = lengths.microbatch(Rows(rows=(examples_of(lengths),)))
    assert (found["cu_seqlens"].tolist(), found["max_seqlen"]) == ([0, 4, 6, 9], 4)


def pairs(batch: Any) -> list[Any]:
    """Examples of a batch whose first half of rows belongs to the second half."""
    rows, targets = batch
    half = len(targets)
    return [(rows[number], rows[half + number], targets[number]) for number in range(half)]


def together(examples: list[Any]) -> Any:
    """The batch with these pairs."""
    first, second, targets = (torch.stack(each) for each in zip(*examples, strict=True))
    return torch.cat([first, second]), targets


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no rows": ({"batch": {"loss": 3.0}}, "batch is not valid: none of its tensors has a dim for rows"),
    "other rows": ({"batch": (torch.ones(3, 2), torch.ones(2))}, "'0' has 3 rows and '1' has 2"),
    "one row": ({"batch": (torch.ones(1, 3), torch.ones(1, 3))}, "it has one row"),
    "unclear": ({"batch": (IDS, IDS, 2 * IDS)}, "batch '2' is not valid: its role is not clear from its name"),
    "unknown field": ({"fields": {"ids": "tokens"}}, "fields 'ids' is not valid: the batch has no such tensor"),
    "unknown role": ({"fields": {"0": "words"}}, "fields 0='words' is not valid: there is no such role"),
    "holes": ({"batch": {"input_ids": IDS, "attention_mask": torch.tensor([[1, 0, 1, 1]] * 3)}}, "row 0 has a 0 between ones"),
    "normaliser": ({"normaliser": "words"}, "normaliser 'words' is not valid"),
    "microbatches": ({"microbatches": "odd"}, "microbatches 'odd' is not valid"),
    "window": ({"window": 0}, "window 0 is not valid"),
    "side": ({"padding_side": ("top",)}, "padding_side"),
    "packing": ({"packing": "bags", "batch": {"input_ids": IDS}}, "packing 'bags' is not valid: it does not exist"),
    "packed rows": ({"packing": "position_ids"}, "the batch has no tokens"),
    "packed tuple": ({"packing": "position_ids", "batch": (IDS, IDS)}, "the batch is a tuple"),
    "examples": ({"examples": pairs}, "examples without collate is not valid"),
    "examples type": (
        {"examples": lambda batch: 3, "collate": together},
        "examples is not valid: it returned a value of type int",
    ),
    "collate drops": (
        {"examples": list, "collate": lambda rows: torch.stack(rows[1:]), "batch": IDS},
        "for 3 examples it returned 2 rows",
    ),
    "collate reorders": (
        {"examples": list, "collate": lambda rows: torch.stack(rows[::-1]), "batch": IDS},
        "it returned the rows in another order than the batch",
    ),
    "collate loses": (
        {"examples": lambda batch: list(batch["x"]), "collate": lambda rows: {"y": torch.stack(rows)}, "batch": {"x": IDS}},
        "it returned no tensor for 'x'",
    ),
    "packed examples": (
        {"examples": pairs, "collate": together, "packing": "position_ids"},
        "packing together with examples is not valid",
    ),
    "step": ({"step": 3}, "step 3 is not valid: it is not callable"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name: str) -> None:
    """With the argument, its value and the allowed form."""
    arguments, words = BAD[name]
    given: dict[str, Any] = {"model": lambda: nn.Linear(3, 3), "step": steps.step_of(steps.squared), "batch": numbers(3)}
    with pytest.raises(UsageError) as raised:
        check_batching(**given | arguments)
    text = str(raised.value)
    assert text.startswith("check_batching: ")
    assert words in text
    assert "Expected " in text
    assert "\n" not in text


def flattened(examples: list[Any]) -> Any:
    """One row with positions."""
    labels = [torch.cat([torch.tensor([steps.IGNORED]), each["labels"][1:]]) for each in examples]
    ids = [each["input_ids"] for each in examples]
    positions = [torch.arange(len(each)) for each in ids]
    return {name: torch.cat(parts)[None] for name, parts in (("input_ids", ids), ("labels", labels), ("position_ids", positions))}


@pytest.mark.parametrize(
    ("packing", "words"),
    [
        (lambda examples: flattened(examples[:-1]), "it dropped or changed tokens of example 3"),
        (lambda examples: flattened(examples[::-1]), "it put example 1 before an earlier example"),
    ],
)
def test_a_packing_function_that_drops_or_reorders_examples_is_refused(packing: Any, words: str) -> None:
    """The check would blame the step."""
    with pytest.raises(UsageError, match=words) as raised:
        check_batching(model=Causal, step=steps.token_mean, batch=tokens(), packing=packing)
    assert str(raised.value).startswith("check_batching: packing is not valid: ")
    assert "\n" not in str(raised.value)


def preference(*, of_all: bool) -> Any:
    """A loss over pairs of rows, of all microbatches or of each."""

    def loss_of(model: Any, batch: Any, batches: list[Any]) -> torch.Tensor:
        first, second = model(batch[0]).chunk(2)
        own = (nn.functional.softplus(second - first).sum(1) * batch[1]).sum()
        return own / (sum(len(each[1]) for each in batches) if of_all else len(batch[1]) * len(batches))

    return steps.step_of(loss_of)


@pytest.mark.parametrize("of_all", [True, False])
def test_examples_may_be_taken_apart_by_the_user(*, of_all: bool) -> None:
    """Such as pairs of answers, of which a batch has twice as many rows as targets."""
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(10, 3, generator=generator), torch.rand(5, generator=generator) + 0.5
    verdict = check_batching(
        model=lambda: nn.Linear(3, 2), step=preference(of_all=of_all), batch=batch, examples=pairs, collate=together
    )
    assert verdict.outcome is (Outcome.EQUIVALENT if of_all else Outcome.DIVERGED), verdict
    assert verdict.read == ("examples by your function",)
    declared = check_batching(
        model=lambda: nn.Linear(3, 2),
        step=preference(of_all=of_all),
        batch=batch,
        examples=pairs,
        collate=together,
        weight=lambda pair: float(pair[2]),
        normaliser="sequence",
    )
    assert declared.outcome is (Outcome.EQUIVALENT if of_all else Outcome.DIVERGED), declared
    if not of_all:
        assert verdict.cause.startswith("mean over the counted tokens of each microbatch, then the mean over microbatches")


def test_a_step_that_draws_random_numbers_is_refused() -> None:
    """Its arrangements would differ by luck."""

    class Dropped(Causal):
        def forward(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
            return torch.dropout(super().forward(*arguments, **keywords), 0.5, train=True)

    with pytest.raises(UsageError, match=r"check_batching: .*random numbers"):
        check_batching(model=Dropped, step=steps.token_mean, batch=tokens())
