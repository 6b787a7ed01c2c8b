"""Matches two runs' names when they are compared: by a name map, or without wrappers that only one run has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import takewhile

from equivcheck.errors import UsageError
from equivcheck.recording.adapters.names import Source, places_of, unmatched_sources
from equivcheck.recording.trace import RankTrace
from equivcheck.worlds.trace.trace import Piece

Shapes = Mapping[str, tuple[int, ...]]
Rename = Callable[[str], str]
_WRAPPERS = frozenset({"module", "model", "_orig_mod", "_forward_module", "base_model"})
"""Attributes in which wrappers keep the model."""


def match_names(
    first: Sequence[RankTrace], other: Sequence[RankTrace], sources: Sequence[Source] = ()
) -> tuple[tuple[RankTrace, ...], tuple[str, ...]]:
    """Rename the tensors in the run `other`, so that each has the same name as in the run `first`.

    `sources` is the user's name map. Returns the renamed run, and a clause if wrappers' prefixes were ignored. Raises
    `UsageError` if an entry names a tensor that its run does not have, names tensors with different shapes, or fuses or
    transposes tensors.
    """
    known, own = _shapes(first), _shapes(other)
    names = _mapped(sources, own, known)
    shapes = {names.get(name, name): shape for name, shape in own.items()}
    one = {name: shape for name, shape in known.items() if name not in shapes}
    another = {name: shape for name, shape in shapes.items() if name not in known}
    way = _way(one, another) if one and another else None
    if way is None:
        return tuple(_with_names(trace, names, {}) for trace in other) if names else tuple(other), ()
    pairs = way.pairs(one, another)
    names = {name: pairs.get(new, new) for name in own if (new := names.get(name, name)) != name or new in pairs}
    modules = way.pairs(_modules(first), _modules(other), is_module=True)
    return tuple(_with_names(trace, names, modules) for trace in other), (f"{len(pairs)} names match without {way.removed}",)


def _modules(traces: Sequence[RankTrace]) -> dict[str, None]:
    """Return the modules with outputs by name, inner modules first."""
    found = {output.module for trace in traces for step in trace.steps for output in step.outputs}
    return dict.fromkeys(sorted(found, key=len, reverse=True))


def _shapes(traces: Sequence[RankTrace]) -> dict[str, tuple[int, ...]]:
    """Return full shapes by name, without optimizer state."""
    pieces = {id(entry.piece): entry.piece for trace in traces for step in trace.steps for entry in step.entries}
    return {piece.name: piece.shape for piece in pieces.values() if "/" not in piece.name}


def _mapped(sources: Sequence[Source], own: Shapes, known: Shapes) -> dict[str, str]:
    """Return each tensor's new name according to the map."""
    for source in sources:
        if source.is_fused or source.is_transposed:
            raise UsageError(
                f"names[{source.target!r}] is not valid for compare: it splits or transposes a tensor, which only `record` "
                "can do. Expected this entry in the names for record, not in those for compare."
            )
    for name in unmatched_sources(sources, list(own)):
        raise UsageError(
            f"the names entry with {name!r} is not valid: the second run has no such tensor. Expected a tensor name of that run."
        )
    found = {name: place.name for name, place in places_of(sources, own).items()}
    for name, new in found.items():
        if new not in known:
            raise UsageError(
                f"the names entry for {name!r} is not valid: the first run has no tensor {new!r}. "
                "Expected a tensor name of that run."
            )
        if known[new] != own[name]:
            raise UsageError(
                f"the names entry for {name!r} is not valid: its shape is {own[name]}, and {new!r} has {known[new]}. Expected "
                "tensors with the same shape; names for record can transpose and fuse."
            )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """A way to remove wrappers from names."""

    removed: str
    """Removed words, in quotes."""
    first: Rename
    """Function for the first run's names."""
    other: Rename
    """Function for the other run's names."""

    def pairs(self, first: Iterable[str], other: Iterable[str], *, is_module: bool = False) -> dict[str, str]:
        """Map names in the other run to names in the first run. Two names match if they are equal without wrappers' prefixes.

        If several names in one run are then equal, only the last one is used.
        """
        end = "." if is_module else ""
        own = {self.first(name + end).strip("."): name for name in first}
        others = {self.other(name + end).strip("."): name for name in other}
        return {others[name]: own[name] for name in others if name in own}


def _way(first: Shapes, other: Shapes) -> _Way | None:
    """Return the first way in which all names of the run with fewer names match, most of them with equal shapes."""
    for way in _ways(list(first), list(other)):
        pairs = way.pairs(first, other)
        num_same_shape = sum(first[own] == other[name] for name, own in pairs.items())
        is_unique = all(len({*map(rename, names)}) == len(names) for rename, names in ((way.first, first), (way.other, other)))
        if is_unique and len(pairs) == min(len(first), len(other)) and 2 * num_same_shape > len(pairs):
            return way
    return None


def _ways(first: Sequence[str], other: Sequence[str]) -> Iterator[_Way]:
    one, another = _dotted_prefix(first), _dotted_prefix(other)
    longer, shorter = sorted((one, another), key=len, reverse=True)
    if longer.endswith(shorter) and longer != shorter:
        yield _Way(
            removed=repr(longer.removesuffix(shorter)),
            first=lambda name: name.removeprefix(one),
            other=lambda name: name.removeprefix(another),
        )
    words, other_words = ({word for name in names for word in name.split(".") if not word.isdigit()} for names in (first, other))
    for own, others in ((set(), other_words - words), (words - other_words, set()), (_WRAPPERS, _WRAPPERS)):
        removed = (own | others) & (words | other_words)
        yield _Way(removed=", ".join(map(repr, sorted(removed))), first=_drop(own), other=_drop(others))


def _dotted_prefix(names: Sequence[str]) -> str:
    """Return the longest dotted prefix with which all names begin."""
    modules = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return "".join(f"{own[0]}." for own in takewhile(lambda own: len({*own}) == 1, modules))


def _drop(words: AbstractSet[str]) -> Rename:
    return lambda name: ".".join(word for word in name.split(".") if word not in words)


def _with_names(trace: RankTrace, names: Mapping[str, str], modules: Mapping[str, str]) -> RankTrace:
    """Return the trace with other names for tensors, and for modules with outputs."""
    pieces: dict[int, Piece] = {}

    def rename(piece: Piece) -> Piece:
        if id(piece) not in pieces:
            base, slash, key = piece.name.partition("/")
            pieces[id(piece)] = replace(piece, name=names.get(base, base) + slash + key)
        return pieces[id(piece)]

    steps = tuple(
        replace(
            step,
            entries=tuple(replace(entry, piece=rename(entry.piece)) for entry in step.entries),
            outputs=tuple(replace(output, module=modules.get(output.module, output.module)) for output in step.outputs),
        )
        for step in trace.steps
    )
    return replace(trace, steps=steps)
