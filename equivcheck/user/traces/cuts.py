"""Positions of plain shards in full parameters, read from the user's `cuts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from equivcheck.training.read import box_of
from equivcheck.user.usage import invalid
from equivcheck.worlds.trace.trace import Piece

Cuts = Mapping[str, Sequence[tuple[int, str]]]
"""Maps parameter names, or `fnmatch` patterns, to pairs of dim and mesh axis."""


def require_cuts(cuts: Any, axes: Sequence[str]) -> dict[str, tuple[tuple[int, str], ...]] | None:
    """Check the user's `cuts`. Raises `UsageError` if an entry is not a pair of dim and axis, or repeats an axis."""
    if cuts is None:
        return None
    expected = f"a dict such as {{'0.weight': ((0, {axes[-1]!r}),)}}, with each axis from {', '.join(axes)} at most once per name"
    if not isinstance(cuts, Mapping):
        raise invalid(f"cuts {cuts!r:.100}", "it is not a dict", expected)
    for name, pairs in cuts.items():
        if not (isinstance(name, str) and _are_pairs(pairs, axes)):
            raise invalid(f"cuts entry {name!r}: {pairs!r:.100}", "it is not a name with pairs of dim and axis", expected)
    return {name: tuple((dim, axis) for dim, axis in pairs) for name, pairs in cuts.items()}


def _are_pairs(pairs: Any, axes: Sequence[str]) -> bool:
    if not (isinstance(pairs, (tuple, list)) and all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs)):
        return False
    named = [axis for _, axis in pairs]
    are_dims = all(isinstance(dim, int) and not isinstance(dim, bool) for dim, _ in pairs)
    return are_dims and set(named) <= set(axes) and len(set(named)) == len(named)


class ShardBoxes:
    """This rank's boxes in full parameters, split as by `torch.chunk` along outer axes first."""

    def __init__(self, cuts: Cuts, shapes: Mapping[str, tuple[int, ...]], mesh: DeviceMesh) -> None:
        """`shapes` are the full parameters' shapes. Raises `UsageError` if a name or dim does not exist."""
        for pattern in cuts:
            if not any(fnmatchcase(name, pattern) for name in shapes):
                raise invalid(
                    f"cuts entry {pattern!r}", "no parameter has this name", f"one of {', '.join(shapes)}, or a pattern"
                )
        self._boxes: dict[str, Piece] = {}
        for name, shape in shapes.items():
            pairs = next((pairs for pattern, pairs in cuts.items() if fnmatchcase(name, pattern)), ())
            if pairs:
                self._boxes[name] = box_of(name, shape, mesh, _placements(name, shape, pairs, mesh))

    def place(self, piece: Piece) -> Piece:
        """Move a piece from a local tensor to its position in the full tensor.

        Works for parameters and optimizer state. Raises `UsageError` if the local shape does not fit.
        """
        box = self._boxes.get(piece.name.partition("/")[0])
        if box is None:
            return piece
        if piece.shape != box.size:
            raise invalid(
                f"cuts entry for {piece.name!r}",
                f"the full shape {box.shape} gives this rank a shard {box.size}, but its tensor is {piece.shape}",
                "shards as torch.chunk makes them, or full_tensors=fn(module)",
            )
        start = piece.start or (0,) * len(box.shape)
        moved = tuple(first + within for first, within in zip(box.start, start, strict=True))
        return replace(piece, shape=box.shape, start=moved, size=piece.size or piece.shape)


def _placements(name: str, shape: tuple[int, ...], pairs: Sequence[tuple[int, str]], mesh: DeviceMesh) -> list[Placement]:
    found: dict[str, Placement] = {}
    for dim, axis in pairs:
        if not -len(shape) <= dim < len(shape):
            expected = f"a dim from {-len(shape)} to {len(shape) - 1}" if shape else "no entry, because it has no dims"
            raise invalid(f"cuts entry {name!r}", f"shape {shape} has no dim {dim}", expected)
        found[axis] = Shard(dim % len(shape))
    return [found.get(axis, Replicate()) for axis in mesh.mesh_dim_names or ()]
