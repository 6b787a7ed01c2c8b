"""Arrangements of the same examples in other microbatches, with other padding, packing or accumulation windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from equivcheck.arrangements.format import Format
from equivcheck.arrangements.rows import Example, Packing, Rows, Side
from equivcheck.scenario.scenario import count
from equivcheck.system.choice import PrintableEnum


class Kind(PrintableEnum):
    """Ways in which an arrangement changes the batch."""

    WHOLE = "whole"
    SPLIT = "split"
    BLANK = "blank"
    TWICE = "twice"
    PADDED = "padded"
    PACKED = "packed"
    ALONE = "alone"
    RANKS = "ranks"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrangement:
    """One way to put a batch's examples together: their microbatches, padding, packing and ranks."""

    name: str
    """Phrase for the verdict, such as ``2 even microbatches``."""
    kind: Kind
    """How the arrangement changes the batch."""
    microbatches: tuple[Rows, ...]
    """Rows in each microbatch, in order."""
    has_blank: bool = False
    """Whether the arrangement has one additional row without counted labels."""
    ranks: tuple[tuple[Rows, ...], ...] = ()
    """Each data rank's microbatches; empty on one device."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Constraints:
    """Properties of the user's training step, such as its microbatches per update.

    They decide which arrangements are checked.
    """

    window: int | None
    """Number of microbatches per update; None if any number is possible."""
    needs_even: bool
    """Whether all microbatches must have equally many rows."""
    has_microbatch_terms: bool
    """Whether a loss term depends on several rows in a microbatch. Such rows must stay together."""
    sides: tuple[Side, ...]
    """Sides on which rows may be padded."""


def whole_batch(given: Format, examples: Sequence[Example]) -> Arrangement:
    """Return the arrangement with all examples in one microbatch, each in its own row."""
    return Arrangement(name="one microbatch", kind=Kind.WHOLE, microbatches=(rows_of(given, examples),))


def single_example(given: Format, example: Example) -> Arrangement:
    """Return an arrangement with only this example."""
    return Arrangement(name="a single example", kind=Kind.ALONE, microbatches=(rows_of(given, [example]),))


def arrangements(given: Format, examples: Sequence[Example], constraints: Constraints) -> Iterator[Arrangement]:
    """Yield arrangements with the same gradients as `whole_batch`.

    `Kind.TWICE` repeats the batch, so its gradients may double.
    """
    if not constraints.has_microbatch_terms:
        yield from _splits(given, examples, constraints)
        yield from _blanks(given, examples, constraints)
    yield Arrangement(name="other order", kind=Kind.SPLIT, microbatches=(rows_of(given, examples[::-1]),))
    if constraints.window is None or constraints.window > 1:
        yield Arrangement(name="batch twice", kind=Kind.TWICE, microbatches=(rows_of(given, examples),) * 2)
    if given.has_tokens:
        yield from _paddings(examples, constraints)
        if given.packing is not None:
            yield from _packings(given, examples, constraints)


def rows_of(given: Format, examples: Sequence[Example]) -> Rows:
    """Return a microbatch with each example in its own row, padded as in the user's batch."""
    return Rows(rows=tuple((example,) for example in examples), side=given.default_side)


def _splits(given: Format, examples: Sequence[Example], constraints: Constraints) -> Iterator[Arrangement]:
    n, half = len(examples), len(examples) // 2
    halves = "2 even microbatches" if n % 2 == 0 else f"microbatches of {half} and {n - half} rows"
    groups: dict[str, list[Sequence[Example]]] = {
        halves: [examples[:half], examples[half:]],
        f"microbatches of 1 and {n - 1} rows": [examples[:1], examples[1:]],
        f"microbatches of {n - 1} and 1 rows": [examples[:-1], examples[-1:]],
        "every second row in one microbatch": [examples[::2], examples[1::2]],
        "one row per microbatch": [[example] for example in examples],
    }
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for name, parts in groups.items():
        key = tuple(tuple(map(id, part)) for part in parts)
        is_even = len({len(part) for part in parts}) == 1
        if len(parts) < 2 or key in seen or (constraints.needs_even and not is_even):
            continue
        if constraints.window is not None and len(parts) > constraints.window:
            continue
        seen.add(key)
        yield Arrangement(name=name, kind=Kind.SPLIT, microbatches=tuple(rows_of(given, part) for part in parts))
    if constraints.window is not None:
        yield from _windows(given, examples, constraints, seen)


def _windows(
    given: Format, examples: Sequence[Example], constraints: Constraints, seen: set[tuple[tuple[int, ...], ...]]
) -> Iterator[Arrangement]:
    """Yield a full accumulation window, and a shorter, last window."""
    assert constraints.window is not None
    for num, name in ((constraints.window, "full window of"), (constraints.window - 1, "trailing window of")):
        if not 1 < num <= len(examples) or (constraints.needs_even and len(examples) % num):
            continue
        ends = [round(len(examples) * number / num) for number in range(num + 1)]
        parts = [examples[start:end] for start, end in pairwise(ends)]
        if tuple(tuple(map(id, part)) for part in parts) in seen:
            continue
        microbatches = tuple(rows_of(given, part) for part in parts)
        yield Arrangement(name=f"{name} {count(num, 'microbatch', 'microbatches')}", kind=Kind.SPLIT, microbatches=microbatches)


def _blanks(given: Format, examples: Sequence[Example], constraints: Constraints) -> Iterator[Arrangement]:
    """Yield a microbatch without counted labels: a copy of the first example."""
    blank = given.without_labels(examples[0])
    if blank.num_counted or (constraints.window is not None and constraints.window < 2) or constraints.needs_even:
        return
    parts = {"last": (examples, [blank]), "first": ([blank], examples)}
    for where, both in parts.items():
        yield Arrangement(
            name=f"{where} microbatch without labels",
            kind=Kind.BLANK,
            microbatches=tuple(rows_of(given, part) for part in both),
            has_blank=True,
        )


def _paddings(examples: Sequence[Example], constraints: Constraints) -> Iterator[Arrangement]:
    for side in constraints.sides:
        for extra in (0, 2, 3):
            is_default = side is Side.RIGHT and not extra
            if not is_default:
                microbatch = Rows(rows=tuple((example,) for example in examples), side=side, extra=extra)
                by = f", by {extra} more" if extra else ""
                yield Arrangement(name=f"padded on the {side.value}{by}", kind=Kind.PADDED, microbatches=(microbatch,))


def _packings(given: Format, examples: Sequence[Example], constraints: Constraints) -> Iterator[Arrangement]:
    half = len(examples) // 2
    one, other = tuple(examples[:half]), tuple(examples[half:])
    packed: list[tuple[str, tuple[Rows, ...]]] = [
        ("packed in one row", (Rows(rows=(tuple(examples),)),)),
        ("packed in other order", (Rows(rows=(tuple(examples[::-1]),)),)),
    ]
    if given.packing is not Packing.CU_SEQLENS and not callable(given.packing):
        packed.append(("packed in two rows", (Rows(rows=(one, other)),)))
        packed.append(("packed and padded", (Rows(rows=(tuple(examples),), extra=3),)))
    may_split = not constraints.has_microbatch_terms and constraints.window != 1
    if may_split and min(len(one), len(other)) > 1:
        packed.append(("packed in two microbatches", (Rows(rows=(one,)), Rows(rows=(other,)))))
    for name, microbatches in packed:
        yield Arrangement(name=name, kind=Kind.PACKED, microbatches=microbatches)
