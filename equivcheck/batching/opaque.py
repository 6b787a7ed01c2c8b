"""Examples that the user's own functions take out of a batch and put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from equivcheck.batching.format import Format
from equivcheck.batching.rows import Example, Rows
from equivcheck.batching.usage import invalid

Collate = Callable[[list[Any]], Any]
"""Function from examples to a batch."""


class OpaqueFormat(Format):
    """Batches without roles: their rows can be split and reordered, but neither padded nor packed."""

    __slots__ = ("_collate",)

    def __init__(self, batch: Any, collate: Collate) -> None:
        super().__init__(batch=batch, fields=(), pad_id=0, ignore_index=0, packing=None)
        object.__setattr__(self, "_collate", collate)

    def microbatch(self, given: Rows) -> Any:
        """Call the user's function."""
        collate: Collate = self._collate  # type: ignore[attr-defined]
        return collate([example.value for example in given.examples])

    def halves(self, example: Example) -> None:  # noqa: ARG002 - an example without labels
        """No example can be halved."""
        return

    def without_labels(self, example: Example) -> Example:
        """Return the example: its labels are unknown, so no presentation has a row without labels."""
        return example


def opaque_examples(batch: Any, examples: Callable[[Any], Sequence[Any]], weight: Callable[[Any], float] | None) -> list[Example]:
    """Take a batch apart with the user's functions. Raises `UsageError` if they return something else than a sequence."""
    found = examples(batch)
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise invalid("examples", f"it returned a {type(found).__name__}", "a list of examples")
    weights = [1.0 if weight is None else float(weight(each)) for each in found]
    rows = zip(found, weights, strict=True)
    return [Example(values={}, length=1, num_counted=1, num_labels=1, weight=own, value=each) for each, own in rows]
