"""Name maps: a tensor's name in another run, and how that run stores it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equivcheck.errors import UsageError
from equivcheck.recording.adapters.parts import Ints, Move, swap_last_dims
from equivcheck.worlds.trace.trace import Piece

Names = Mapping[str, str | Mapping[str, Any]]
"""For each new name, which is the other run's name for a tensor: this run's name, or a table that says how tensors are combined.
"""

_FORM = (
    "a name, {name = 'NAME', transpose = true}, {parts = ['NAME', ...], dim = 0, groups = 1} or {tied = ['NAME', ...]}, with as "
    "many * in each name as in the new one"
)
_KEYS = {"name": {"transpose"}, "parts": {"dim", "groups", "transpose"}, "tied": {"transpose"}}
"""For each key of a table that holds names, the other keys that the table may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One entry in a name map: which recorded tensors get the new name `target`."""

    target: str
    """New name. It may contain ``*``."""
    names: tuple[str, ...]
    """Names or patterns in this run. Several names are fused into the new tensor, or belong to one tied tensor."""
    is_fused: bool = False
    """Whether each name in `names` is only a part of the new tensor."""
    dim: int = 0
    """Dim along which the tensors in `names` are concatenated in the new tensor."""
    groups: int = 1
    """Into how many equal groups each tensor in `names` is divided. The new tensor takes one group from each tensor in turn."""
    is_transposed: bool = False
    """Whether the last two dims are swapped before the tensors are fused."""

    def matches(self, name: str) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Yield the index of each pattern in `names` that matches `name`, with the texts for which ``*`` stands."""
        for number, pattern in enumerate(self.names):
            expression = "(.*)".join(map(re.escape, pattern.split("*")))
            if found := re.fullmatch(expression, name):
                yield number, found.groups()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A tensor's name and position in another run."""

    name: str
    """The tensor's name in the other run."""
    is_transposed: bool = False
    """Whether the last two dims are swapped before `move` is applied."""
    move: Move | None = None
    """Position in the other run's fused tensor; None if the tensor is not fused."""


def require_names(names: Any) -> tuple[Source, ...]:
    """Check the argument `names`, a name map.

    Raises `UsageError` if an entry has a wrong form, or if two entries contain the same tensor name.
    """
    if names is None:
        return ()
    if not isinstance(names, Mapping):
        raise UsageError(f"names {names!r:.100} is not valid: it is not a dict. Expected new names, each with {_FORM}.")
    found = tuple(_source(target, value) for target, value in names.items())
    targets: dict[str, str] = {}
    for source in found:
        for name in source.names:
            if name in targets:
                raise UsageError(
                    f"names[{source.target!r}] is not valid: {name!r} already occurs in the entry {targets[name]!r}. "
                    "Expected one new name for each tensor."
                )
            targets[name] = source.target
    return found


def _source(target: Any, value: Any) -> Source:
    table = {"name": value} if isinstance(value, str) else value
    kind = next((kind for kind in _KEYS if isinstance(table, Mapping) and kind in table), "")
    if not isinstance(target, str) or not kind or not {*table} <= {kind, *_KEYS[kind]}:
        hint = " In TOML, put names with dots in quotes." if isinstance(table, Mapping) and not kind else ""
        raise UsageError(f"names[{target!r}]: {value!r:.100} is not valid: its form is wrong. Expected {_FORM}.{hint}")
    own: Mapping[str, Any] = table
    names = (own[kind],) if kind == "name" else own[kind]
    groups, dim, transpose = own.get("groups", 1), own.get("dim", 0), own.get("transpose", False)
    is_valid = (
        isinstance(names, (tuple, list))
        and names
        and all(isinstance(name, str) and name.count("*") == target.count("*") for name in names)
        and type(groups) is int
        and groups > 0
        and type(dim) is int
        and isinstance(transpose, bool)
    )
    if not is_valid:
        raise UsageError(f"names[{target!r}]: {value!r:.100} is not valid: its form is wrong. Expected {_FORM}.")
    return Source(target=target, names=tuple(names), is_fused=kind == "parts", dim=dim, groups=groups, is_transposed=transpose)


def load_names(file: Path) -> Names:
    """Read a name map from a TOML file. Raises `UsageError` if it is not valid."""
    found = load_toml(file)
    require_names(found)
    return found


def load_toml(file: Path) -> dict[str, Any]:
    """Read a TOML file. Raises `UsageError` if it cannot be read."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"file {file} is not valid: {error}. Expected a TOML file.") from error


def places_of(sources: Sequence[Source], shapes: Mapping[str, Ints]) -> dict[str, Place]:
    """Return the name and position in the other run for each tensor that the name map `sources` mentions.

    `shapes` are full shapes by name. If several entries match a tensor, the first one counts. Raises `UsageError` if two tensors
    get the same name, or if tensors with these shapes cannot be fused.
    """
    matched: dict[tuple[Source, tuple[str, ...]], dict[int, str]] = {}
    for name in shapes:
        for source in sources:
            if found := next(source.matches(name), None):
                matched.setdefault((source, found[1]), {})[found[0]] = name
                break
    places: dict[str, Place] = {}
    new = {name: name for name in shapes if all(name not in own.values() for own in matched.values())}
    for (source, texts), own in matched.items():
        target = _filled(source.target, texts)
        if target in new:
            raise UsageError(
                f"names[{source.target!r}] is not valid: {new[target]!r} and {next(iter(own.values()))!r} would both be "
                f"{target!r}. Expected one tensor for each name."
            )
        new[target] = next(iter(own.values()))
        moves = _moves(source, target, [own.get(number) for number in range(len(source.names))], shapes)
        places |= {
            name: Place(name=target, is_transposed=source.is_transposed, move=moves[number]) for number, name in own.items()
        }
    return places


def unmatched_sources(sources: Sequence[Source], names: Sequence[str]) -> list[str]:
    """Return the names and patterns in a name map that match no tensor in `names`."""
    own = [pattern for source in sources for pattern in source.names]
    found = {source.names[number] for source in sources for name in names for number, _ in source.matches(name)}
    return [pattern for pattern in own if pattern not in found]


def _filled(target: str, texts: Sequence[str]) -> str:
    first, *rest = target.split("*")
    return first + "".join(text + part for text, part in zip(texts, rest, strict=True))


def _moves(source: Source, target: str, names: Sequence[str | None], shapes: Mapping[str, Ints]) -> list[Move | None]:
    """Return each part's move into the fused tensor."""
    if not source.is_fused:
        return [None] * len(names)

    def refuse(why: str) -> UsageError:
        return UsageError(
            f"names[{source.target!r}] is not valid: {why}. Expected tensors that can be concatenated to {target!r}."
        )

    present = [name for name in names if name is not None]
    if len(present) < len(names):
        missing = source.names[next(number for number, name in enumerate(names) if name is None)]
        raise refuse(f"the model has {present[0]!r}, but no tensor {missing!r}")
    own = [swap_last_dims(shapes[name]) if source.is_transposed and len(shapes[name]) > 1 else shapes[name] for name in present]
    dims = {len(shape) for shape in own}
    if len(dims) > 1 or not -min(dims) <= source.dim < min(dims):
        raise refuse(f"shapes {', '.join(map(str, own))} have no dim {source.dim}, or different numbers of dims")
    dim = source.dim % min(dims)
    if len({(*shape[:dim], *shape[dim + 1 :]) for shape in own}) > 1:
        raise refuse(f"shapes {', '.join(map(str, own))} differ in a dim other than {dim}")
    if any(shape[dim] % source.groups for shape in own):
        raise refuse(f"dim {dim} of the shapes {', '.join(map(str, own))} cannot be split into {source.groups} equal groups")
    return list(_fused_moves(own, dim, source.groups))


def _fused_moves(shapes: Sequence[Ints], dim: int, groups: int) -> Iterator[Move]:
    counts = [shape[dim] // groups for shape in shapes]
    full = (*shapes[0][:dim], sum(counts) * groups, *shapes[0][dim + 1 :])
    for number, (count, shape) in enumerate(zip(counts, shapes, strict=True)):
        size = (*shape[:dim], count, *shape[dim + 1 :])
        starts = [group * sum(counts) + sum(counts[:number]) for group in range(groups)]
        ends = (0,) * (len(shape) - dim - 1)
        yield Move(
            dim=dim,
            boxes=tuple(Piece(name="", shape=full, start=(*(0,) * dim, start, *ends), size=size) for start in starts),
        )
