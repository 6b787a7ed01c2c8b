"""Orders a sweep: programs with something new come first, so that an aborted sweep has covered as much as possible.

The first pass takes programs until each argument to each operation had each placement. The second also varies shapes and dims,
with one mesh axis at a time; the third all placements for each shape; the fourth pairs of arguments. All others follow.
Programs with all arguments replicated along an axis come last, because they resemble programs on a mesh without that axis. A
pass goes through all operations before the next pass begins.

If two axes have the same size, both orders are swept. DTensor works from the first axis to the last, so one order may be right
and the other wrong.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from equivcheck.programs.nouns import Constant, Leaf, TensorProgram
from equivcheck.programs.nouns.operations.operation import Shape
from equivcheck.programs.nouns.placement import REPLICATE

Features = Iterator[Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How many programs have run in one pass of a sweep, and how many are left.

    A sweep over pairs of operations counts pairs instead.
    """

    name: str
    """Feature in this part's programs that is new, such as placements or shapes."""
    num_covered: int
    """Programs (or pairs of operations) already run."""
    num_left: int
    """Programs (or pairs of operations) not run yet."""


@dataclass(slots=True, kw_only=True)
class Passes:
    """All programs in a sweep, divided into passes that run one after the other, and how many have already run."""

    programs: Mapping[str, Sequence[TensorProgram]]
    """Programs in each pass, by the pass's name."""
    num_run: Counter[str] = field(default_factory=Counter)
    """How many programs have run, by the pass's name."""

    def __len__(self) -> int:
        """Programs in all passes."""
        return sum(map(len, self.programs.values()))

    def __iter__(self) -> Iterator[TensorProgram]:
        """Yield all programs. A program counts as run when the next program is requested."""
        for name, programs in self.programs.items():
            for program in programs:
                yield program
                self.num_run[name] += 1

    def coverage(self) -> tuple[Coverage, ...]:
        """Return for each pass how many programs have run."""
        return tuple(
            Coverage(name=name, num_covered=self.num_run[name], num_left=len(programs) - self.num_run[name])
            for name, programs in self.programs.items()
        )

    def shard(self, number: int, of: int) -> Passes:
        """Return part `number` (from 1) if each pass is divided into `of` parts. The parts share no program."""
        return Passes(programs={name: programs[number - 1 :: of] for name, programs in self.programs.items()})


def order_in_passes(programs: Iterable[TensorProgram]) -> Passes:
    """Divide a sweep's programs into passes, which run one after another. Each program is in one pass."""
    found: dict[str, list[TensorProgram]] = {name: [] for name in (*_FEATURES, _OTHERS, _FEWER_AXES)}
    for _, of_operation in itertools.groupby(programs, lambda program: program.operations[-1]):
        left, fewer = _by_use_of_axes(_shuffled(of_operation))
        for name, features in _FEATURES.items():
            new, left = _split(left, features)
            found[name] += _alike_together(new)
        found[_OTHERS] += _alike_together(left)
        found[_FEWER_AXES] += _alike_together(fewer)
    return Passes(programs=found)


def _shuffled(programs: Iterable[TensorProgram]) -> list[TensorProgram]:
    """Shuffle, because otherwise all arguments but the last stay replicated until the last had all its placements."""
    found = list(programs)
    random.Random(0).shuffle(found)
    return found


def _by_use_of_axes(programs: list[TensorProgram]) -> tuple[list[TensorProgram], list[TensorProgram]]:
    """Return programs in which each axis changes something, or with a single axis, and all other programs."""
    found: tuple[list[TensorProgram], list[TensorProgram]] = ([], [])
    for program in programs:
        along_axes = zip(*(each.placements for each in _arguments(program)), strict=True)
        idle = len(program.mesh) > 1 and any(set(along) == {REPLICATE} for along in along_axes)
        found[idle].append(program)
    return found


def _split(
    programs: list[TensorProgram], features: Callable[[TensorProgram], Features]
) -> tuple[list[TensorProgram], list[TensorProgram]]:
    """Return programs with a feature that no earlier program has, and all other programs."""
    seen: set[Hashable] = set()
    new: list[TensorProgram] = []
    others: list[TensorProgram] = []
    for program in programs:
        own = set(features(program))
        (others if own <= seen else new).append(program)
        seen |= own
    return new, others


def _alike_together(programs: list[TensorProgram]) -> list[TensorProgram]:
    """Group programs that differ only in placements, because one device computes the same for them."""
    groups: dict[Hashable, list[TensorProgram]] = {}
    for program in programs:
        groups.setdefault((program.statements[-1], *_shapes(program)), []).append(program)
    return [program for group in groups.values() for program in group]


def _arguments(program: TensorProgram) -> tuple[Leaf | Constant, ...]:
    return tuple(each for each in program.statements if isinstance(each, (Leaf, Constant)))


def _shapes(program: TensorProgram) -> tuple[Shape, ...]:
    return tuple(each.shape for each in _arguments(program))


def _placements(program: TensorProgram) -> Features:
    return enumerate(each.placements for each in _arguments(program))


def _placements_along_axes(program: TensorProgram) -> Features:
    for number, each in enumerate(_arguments(program)):
        for axis, placement in enumerate(each.placements):
            yield program.statements[-1], each.shape, number, axis, placement


def _placements_of_shapes(program: TensorProgram) -> Features:
    return zip(_shapes(program), _placements(program), strict=True)


def _pairs(program: TensorProgram) -> Features:
    return itertools.combinations(_placements(program), 2)


_FEATURES: dict[str, Callable[[TensorProgram], Features]] = {
    "placements of an argument": _placements,
    "placements along an axis, by shape and dim": _placements_along_axes,
    "placements of an argument, by shape": _placements_of_shapes,
    "placements of two arguments": _pairs,
}
"""Feature that is new in each pass's programs."""
_OTHERS = "all others"
_FEWER_AXES = "an axis along which all arguments are replicated"
