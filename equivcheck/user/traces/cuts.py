"""Where plain shards of a user's parameters lie in the whole ones, by what the user says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from equivcheck.errors import UsageError
from equivcheck.training.read import box_of
from equivcheck.worlds.trace.trace import Piece

Cuts = Mapping[str, Sequence[tuple[int, str]]]
"""By the name of a parameter, or a pattern as of `fnmatch`: dims, and the axis of the mesh along which each is cut."""


def require_cuts(cuts: Any, axes: Sequence[str]) -> dict[str, tuple[tuple[int, str], ...]] | None:
    """Cuts as users give them. Raises `UsageError` for what names no dim and axis, and an axis twice."""
    if cuts is None:
        return None
    allowed = f"a dict such as {{'0.weight': ((0, {axes[-1]!r}),)}}, each axis one of {', '.join(axes)} and named once"
    if not isinstance(cuts, Mapping):
        raise UsageError(f"check_training: cuts is {cuts!r:.100}; allowed: {allowed}")
    for name, pairs in cuts.items():
        if not (isinstance(name, str) and _are_pairs(pairs, axes)):
            raise UsageError(f"check_training: cuts has {name!r}: {pairs!r:.100}; allowed: {allowed}")
    return {name: tuple((dim, axis) for dim, axis in pairs) for name, pairs in cuts.items()}


def _are_pairs(pairs: Any, axes: Sequence[str]) -> bool:
    if not (isinstance(pairs, (tuple, list)) and all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs)):
        return False
    named = [axis for _, axis in pairs]
    are_dims = all(isinstance(dim, int) and not isinstance(dim, bool) for dim, _ in pairs)
    return are_dims and set(named) <= set(axes) and len(set(named)) == len(named)


class Parts:
    """The boxes that this rank has of whole parameters: parts as `torch.chunk` makes them, outer axes of the mesh first."""

    def __init__(self, cuts: Cuts, shapes: Mapping[str, tuple[int, ...]], mesh: DeviceMesh) -> None:
        """`shapes` are those of the whole parameters. Raises `UsageError` for names and dims that they do not have."""
        for pattern in cuts:
            if not any(fnmatchcase(name, pattern) for name in shapes):
                raise UsageError(f"check_training: cuts has {pattern!r}, which is no parameter; allowed: {', '.join(shapes)}")
        self._boxes: dict[str, Piece] = {}
        for name, shape in shapes.items():
            pairs = next((pairs for pattern, pairs in cuts.items() if fnmatchcase(name, pattern)), ())
            if pairs:
                self._boxes[name] = box_of(name, shape, mesh, _placements(name, shape, pairs, mesh))

    def place(self, piece: Piece) -> Piece:
        """A piece of what this rank takes for a whole parameter, or its state, as one of the whole.

        Raises `UsageError` for other shapes.
        """
        box = self._boxes.get(piece.name.partition("/")[0])
        if box is None:
            return piece
        if piece.shape != box.size:
            raise UsageError(
                f"check_training: by cuts, this rank has a part {box.size} of {piece.name!r}, which is {box.shape}, "
                f"but what it has is {piece.shape}; allowed: parts as torch.chunk makes them, or full_tensors=..."
            )
        start = piece.start or (0,) * len(box.shape)
        moved = tuple(first + within for first, within in zip(box.start, start, strict=True))
        return replace(piece, shape=box.shape, start=moved, size=piece.size or piece.shape)


def _placements(name: str, shape: tuple[int, ...], pairs: Sequence[tuple[int, str]], mesh: DeviceMesh) -> list[Placement]:
    found: dict[str, Placement] = {}
    for dim, axis in pairs:
        if not -len(shape) <= dim < len(shape):
            allowed = f"{-len(shape)} to {len(shape) - 1}" if shape else "none, it has no dims"
            raise UsageError(f"check_training: cuts has dim {dim} of {name!r}, which is {shape}; allowed: {allowed}")
        found[axis] = Shard(dim % len(shape))
    return [found.get(axis, Replicate()) for axis in mesh.mesh_dim_names or ()]
