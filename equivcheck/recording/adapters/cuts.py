"""Positions for plain shards that the user declares, as `cuts` in `check_training`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from equivcheck.errors import UsageError
from equivcheck.recording.adapters.names import load_toml
from equivcheck.recording.adapters.parts import Move
from equivcheck.user.task import mesh_of
from equivcheck.user.traces.cuts import Cut, Cuts, ShardBoxes, require_cuts
from equivcheck.user.usage import API


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredMesh:
    """The mesh that the user passed to `record`. It spans all ranks in the job, in row-major order."""

    axes: tuple[tuple[str, int], ...]
    """Names and sizes of the axes, outermost axis first."""
    rank: int
    """This process's rank."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """Names of the mesh's axes, outermost first."""
        return tuple(name for name, _ in self.axes)

    def size(self, axis: int) -> int:
        """How many ranks are along the axis with this index."""
        return self.axes[axis][1]

    def get_coordinate(self) -> list[int]:
        """This rank's index along each axis."""
        return [int(index) for index in np.unravel_index(self.rank, [size for _, size in self.axes])]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredCuts:
    """The arguments `cuts` and `mesh` of `record`, after their form was checked."""

    cuts: Mapping[str, tuple[Cut, ...]]
    """For each parameter name or pattern, the dims that are sharded, each with its axis."""
    axes: tuple[tuple[str, int], ...]
    """Names and sizes of the mesh's axes. Empty if the user passed no mesh."""

    def mesh(self) -> DeclaredMesh:
        """The declared mesh, with this process's rank.

        Raises `UsageError` if the mesh and the job have different numbers of ranks.
        """
        num_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if math.prod(size for _, size in self.axes) != num_ranks:
            raise UsageError(
                f"mesh {dict(self.axes)} is not valid: the job has {num_ranks} ranks. Expected sizes with the "
                f"product {num_ranks}."
            )
        return DeclaredMesh(axes=self.axes, rank=dist.get_rank() if num_ranks > 1 else 0)

    def place_on(self, axis: str) -> tuple[int, int] | None:
        """This rank's index along the axis called `axis`, and the axis's size; None if the mesh has no such axis."""
        number = next((number for number, (name, _) in enumerate(self.axes) if name == axis), None)
        return None if number is None else (self.mesh().get_coordinate()[number], self.axes[number][1])

    def unmatched_cuts(self, names: Sequence[str]) -> list[str]:
        """Return the declared names and patterns that no parameter matches."""
        return [pattern for pattern in self.cuts if not any(fnmatchcase(name, pattern) for name in names)]

    def moves(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Move]:
        """Return, for each parameter that `cuts` mentions, where its local elements lie in the full parameter.

        `shapes` are local shapes. Raises `UsageError` if a cut contradicts a shape.
        """
        if not self.cuts:
            return {}
        mesh = self.mesh()
        matched = {name: next((cut for cut in self.cuts if fnmatchcase(name, cut)), None) for name in shapes}
        entries = {name: self.cuts[pattern] for name, pattern in matched.items() if pattern is not None}
        with _errors_of_record():
            full = {name: self._full_shape(shapes[name], cuts) for name, cuts in entries.items()}
            boxes = ShardBoxes(entries, full, mesh)
            found = {name: Move(dim=dim, boxes=own) for name in entries for dim, own in [boxes.boxes_of(name)]}
        for name, move in found.items():
            if move.shape != shapes[name]:
                raise UsageError(
                    f"the cuts entry for {name!r} is not valid: its shard has shape {shapes[name]}, and torch.chunk would give "
                    f"this rank {move.shape}. Expected equal shards, or the dim's full size in the cut, such as 50 in "
                    "(0, 'tp', [50])."
                )
        return found

    def _full_shape(self, shape: tuple[int, ...], cuts: Sequence[Cut]) -> tuple[int, ...]:
        """Return the full shape, if all shards are equal or components declare a dim's full size."""
        sizes, full = dict(self.axes), list(shape)
        for dim, axis, *_ in cuts:
            if -len(shape) <= dim < len(shape):
                full[dim] *= sizes[axis]
        for dim, _, *components in cuts:
            for sizes_of_parts in components:
                if not isinstance(sizes_of_parts, int) and -len(shape) <= dim < len(shape):
                    full[dim] = sum(sizes_of_parts)
        return tuple(full)


def require_declared(cuts: Cuts | None, mesh: Mapping[str, int] | None) -> DeclaredCuts:
    """Check the arguments `cuts` and `mesh`.

    Raises `UsageError` if one of them has a wrong form, or if there are `cuts` without a `mesh`.
    """
    with _errors_of_record():
        axes = mesh_of(mesh) if mesh is not None else ()
        if cuts and not axes:
            raise UsageError(
                "cuts without mesh is not valid: the sizes of its axes are not known. Expected a mesh, such as "
                "{'dp': 2, 'tp': 2}."
            )
        found: dict[str, Any] | None = require_cuts(cuts, [name for name, _ in axes]) if axes else None
    return DeclaredCuts(cuts=found or {}, axes=axes)


def load_cuts(file: Path) -> dict[str, Any]:
    """Read the tables ``mesh`` and ``cuts`` from a TOML file. Raises `UsageError` if one of them is not valid."""
    found = load_toml(file)
    if not {*found} <= {"mesh", "cuts"}:
        raise UsageError(f"file {file} is not valid: it has {', '.join(found)}. Expected only the tables [mesh] and [cuts].")
    require_declared(found.get("cuts"), found.get("mesh"))
    return found


@contextmanager
def _errors_of_record() -> Iterator[None]:
    """Remove the name `check_training` from errors, because the user called `record`."""
    try:
        yield
    except UsageError as error:
        raise UsageError(str(error).removeprefix(f"{API}: ")) from error
