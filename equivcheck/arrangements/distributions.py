"""Ways to distribute the same examples over data ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from equivcheck.arrangements.arrangement import Arrangement, Constraints, Kind, rows_of
from equivcheck.arrangements.format import Format
from equivcheck.arrangements.rows import Example, Rows


def distributions(given: Format, examples: Sequence[Example], constraints: Constraints, num_ranks: int) -> Iterator[Arrangement]:
    """Yield arrangements on `num_ranks` data ranks, with the same gradients as the whole batch on one device.

    Gradients of `Kind.TWICE` may be larger, because each rank gets all rows. All ranks have equally many microbatches, because
    data parallelism communicates once for each microbatch.
    """
    count = len(examples)
    if not constraints.has_microbatch_terms and count >= num_ranks:
        yield from _splits(given, examples, constraints, num_ranks)
    yield _on_ranks("all rows on each rank", [[rows_of(given, examples)]] * num_ranks, Kind.TWICE)


def _splits(given: Format, examples: Sequence[Example], constraints: Constraints, num_ranks: int) -> Iterator[Arrangement]:
    count, may_be_uneven = len(examples), not constraints.needs_even
    parts = _parts(examples, num_ranks)
    if may_be_uneven or count % num_ranks == 0:
        yield _on_ranks("rows split over ranks", [[rows_of(given, part)] for part in parts])
        yield _on_ranks(
            "every second row on another rank", [[rows_of(given, examples[rank::num_ranks])] for rank in range(num_ranks)]
        )
        if given.has_tokens:
            padded = [[rows_of(given, part)] for part in parts]
            padded[0] = [replace(padded[0][0], extra=3)]
            yield _on_ranks("rows split over ranks, the first rank padded by 3 more", padded)
    may_accumulate = constraints.window is None or constraints.window > 1
    if may_accumulate and count >= 2 * num_ranks and (may_be_uneven or count % (2 * num_ranks) == 0):
        halves = [[rows_of(given, half) for half in _parts(part, 2)] for part in parts]
        yield _on_ranks("two microbatches on each rank", halves)
    if may_be_uneven and count > num_ranks:
        uneven = [examples[: count - num_ranks + 1], *([each] for each in examples[count - num_ranks + 1 :])]
        yield _on_ranks("one row on each rank but the first", [[rows_of(given, part)] for part in uneven])
    blank = given.without_labels(examples[0])
    if may_be_uneven and not blank.num_counted and num_ranks > 1:
        others = [[rows_of(given, part)] for part in _parts(examples, num_ranks - 1)]
        yield _on_ranks("a rank without labels", [*others, [rows_of(given, [blank])]], has_blank=True)
        if may_accumulate and all(len(part) > 1 for part in parts[:-1]):
            ranks = [[rows_of(given, half) for half in _parts(part, 2)] for part in parts[:-1]]
            ranks.append([rows_of(given, parts[-1]), rows_of(given, [blank])])
            yield _on_ranks("a rank with a microbatch without labels", ranks, has_blank=True)


def _parts(examples: Sequence[Example], num: int) -> list[Sequence[Example]]:
    """Split examples into consecutive parts of nearly equal sizes."""
    ends = [len(examples) * number // num for number in range(num + 1)]
    return [examples[start:end] for start, end in pairwise(ends)]


def _on_ranks(name: str, ranks: Sequence[Sequence[Rows]], kind: Kind = Kind.RANKS, *, has_blank: bool = False) -> Arrangement:
    own = tuple(map(tuple, ranks))
    return Arrangement(
        name=name, kind=kind, microbatches=tuple(rows for rank in own for rows in rank), has_blank=has_blank, ranks=own
    )
