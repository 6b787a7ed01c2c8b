"""Changes names and positions in a recording, according to declared cuts, Megatron's attributes and the name map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from equivcheck.errors import UsageError
from equivcheck.recording.adapters.cuts import DeclaredCuts
from equivcheck.recording.adapters.masters import Copies, find_copies, values_of
from equivcheck.recording.adapters.megatron import expert_names, shard_of
from equivcheck.recording.adapters.names import Place, Source, places_of, unmatched_sources
from equivcheck.recording.adapters.parts import Move, Part, parts_of
from equivcheck.recording.tensors import Row, entries_of, local_of, move_parameters
from equivcheck.recording.trace import Entry, Moment
from equivcheck.worlds.trace.trace import Piece, Slot


class Adapter:
    """Gives recorded tensors their names and positions in the full model.

    These come from `record`'s arguments `cuts` and `names`, and from Megatron's attributes. Other tensors keep their own names
    and positions.
    """

    def __init__(self, declared: DeclaredCuts, sources: Sequence[Source]) -> None:
        self._declared, self._sources = declared, sources
        self._shards: dict[str, Move] = {}
        self._experts: dict[str, str] = {}
        self._unknown: tuple[str, ...] = ()
        self._places: dict[str, Place] = {}
        self._dtypes: dict[str, str] = {}
        self._attributed: tuple[str, ...] = ()
        self._unmatched: tuple[str, ...] = ()
        self._choice = 0
        self._unmoved: dict[int, torch.Tensor] = {}
        self._adopted: list[Copies] = []

    def learn(self, roots: Sequence[nn.Module], slots: Sequence[Slot], buffers: Sequence[Row]) -> None:
        """Find the names and positions for all parameters and buffers in the models `roots`.

        `slots` are the parameters with their local positions. Raises `UsageError` if the tensors contradict `cuts`, Megatron's
        attributes or the name map.
        """
        owners = {id(own): module for root in roots for module in root.modules() for own in module.parameters(recurse=False)}
        parameters = {piece.name: slot.parameter for slot in slots for piece in slot.pieces if piece.name}
        shapes = {piece.name: piece.shape for slot in slots for piece in slot.pieces if piece.name}
        declared = self._declared.moves(shapes)
        tensor_place, expert_place = (self._declared.place_on(axis) for axis in ("tp", "ep"))
        attributed = {
            name: move
            for name, parameter in parameters.items()
            if name not in declared and (move := shard_of(name, parameter, owners.get(id(parameter)), tensor_place))
        }
        self._shards, self._attributed = declared | attributed, tuple(attributed)
        self._experts, self._unknown = expert_names(parameters, expert_place)
        full = {
            self._experts.get(name, name): self._shards[name].boxes[0].shape if name in self._shards else shape
            for name, shape in shapes.items()
            if name not in self._unknown
        }
        full |= {piece.name: piece.shape for pieces, _ in buffers for piece in pieces}
        self._places = places_of(self._sources, full)
        self._unmatched = (*self._declared.unmatched_cuts(list(shapes)), *unmatched_sources(self._sources, list(full)))
        self._dtypes = {self._target(name): str(parameter.dtype).removeprefix("torch.") for name, parameter in parameters.items()}

    @property
    def copies(self) -> tuple[Slot, ...]:
        """Tensors that an optimizer updates instead of the model's parameters, such as float32 master weights.

        Each slot says which of the parameters' elements a tensor copies.
        """
        return tuple(slot for copies in self._adopted for slot in copies.slots)

    def move_parameters(self, slots: Sequence[Slot], choice: int) -> None:
        """Multiply each parameter's elements by 1 + eps or 1 - eps, with the machine epsilon of the model's dtype.

        `choice` selects a random sign for each element. The optimizer's copies of the parameters are changed later, before its
        first step.
        """
        self._choice = choice
        self._unmoved |= {id(slot.parameter): values_of(slot).to("cpu", copy=True) for slot in slots}
        self._move(slots)

    def _move(self, slots: Sequence[Slot]) -> None:
        rows = []
        for slot in slots:
            name = next(piece.name for piece in slot.pieces if piece.name)
            if slot.parameter.is_floating_point():
                eps = torch.finfo(getattr(torch, self._dtypes[self._target(name)])).eps
                rows += [(row, eps) for row in self.place_row((slot.pieces, slot.parameter))]
        move_parameters(rows, self._choice)

    def adopt_copies(self, tensors: Sequence[torch.Tensor], slots: Sequence[Slot]) -> tuple[Slot, ...]:
        """Before an optimizer's first step, find the parameter of which each tensor in `tensors` is a copy.

        `slots` are the model's parameters. Raises `UsageError` if a tensor is a copy of no parameter.
        """
        copies = self._copies_before_move(tensors, slots) or find_copies(tensors, slots)
        found = {id(slot.parameter) for slot in copies.slots}
        if unknown := [tensor for tensor in tensors if id(tensor) not in found]:
            raise UsageError(
                f"the optimizer's tensor with shape {tuple(unknown[0].shape)} is not valid: no module owns it, and it is not a "
                "copy of a parameter. Expected an optimizer for the model's parameters, or for copies of them, each stored in "
                "its parameter's attribute main_param."
            )
        self._adopted.append(copies)
        return copies.slots

    def _copies_before_move(self, tensors: Sequence[torch.Tensor], slots: Sequence[Slot]) -> Copies | None:
        """Find and move copies that were made before the parameters were moved. None if some are not found.

        Only an optimizer that steps belongs to the job, so copies wait until the first step. No update has read them before.
        """
        if not self._unmoved:
            return None
        try:
            found = find_copies(tensors, slots, lambda slot: self._unmoved.get(id(slot.parameter), values_of(slot)))
        except UsageError:
            return None
        if len(found.slots) < len(tensors):
            return None
        self._move(found.slots)
        return found

    def require_right_copies(self) -> None:
        """After the first update, check that each optimizer copy was assigned to the right parameter.

        Later calls check nothing. Raises `UsageError` if a copy and its parameter differ.
        """
        for copies in self._adopted:
            copies.require_equal()
        self._adopted, self._unmoved = [replace(copies, unsure=()) for copies in self._adopted], {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Clauses for a verdict about the tensors' names and positions.

        One says how many parameters Megatron's attributes mark as shards. Another gives a name in `cuts` or `names` that no
        tensor has.
        """
        found = []
        if self._attributed:
            found.append(f"{len(self._attributed)} parameters are shards by their attribute tensor_model_parallel")
        if self._unknown:
            found.append(f"{len(self._unknown)} expert parameters are not compared, because their experts' numbers are not known")
        found += [f"no tensor is called {name}, which cuts or names mention" for name in self._unmatched]
        return tuple(found)

    def entries(self, moment: Moment, rows: Sequence[Row], *, exactly: bool = False) -> Iterator[Entry]:
        """Compute a sketch of each tensor in `rows`, and yield it with the tensor's name and position in the full model.

        With `exactly`, also hash the tensors' bits.
        """
        placed = [new for row in rows for new in self.place_row(row)]
        for entry in entries_of(moment, placed, exactly=exactly):
            own = self._dtypes.get(entry.piece.name.partition("/")[0], "")
            yield replace(entry, model_dtype=own) if own not in ("", entry.dtype) else entry

    def place_row(self, row: Row) -> Iterator[Row]:
        """Split a tensor's local elements into contiguous views, and yield each with its name and position in the full tensor."""
        pieces, tensor = row
        local = local_of(tensor)
        if not any(map(self._is_changed, pieces)) or local.numel() != sum(piece.numel for piece in pieces):
            yield row
        elif isinstance(tensor, DTensor) and any(isinstance(placement, Partial) for placement in tensor.placements):
            yield tuple(replace(piece, name=self._target(piece.name)) for piece in pieces), tensor
        else:
            values = [local] if len(pieces) == 1 else torch.split(local.reshape(-1), [piece.numel for piece in pieces])
            for piece, own in zip(pieces, values, strict=True):
                if not self._is_changed(piece):
                    yield (piece,), own
                elif _base(piece.name) not in self._unknown:
                    yield from (((part.piece,), part.values) for part in self._parts(piece, own))

    def _parts(self, piece: Piece, values: torch.Tensor) -> Iterator[Part]:
        shard = self._shards.get(_base(piece.name))
        for part in parts_of(piece, values):
            for moved in shard(part) if shard is not None else (part,):
                base = self._experts.get(_base(piece.name), _base(piece.name))
                place = self._places.get(base)
                turned = moved.transpose() if place is not None and place.is_transposed else moved
                for new in place.move(turned) if place is not None and place.move is not None else (turned,):
                    yield new.with_name(base if place is None else place.name)

    def _is_changed(self, piece: Piece) -> bool:
        name = _base(piece.name)
        return any(name in known for known in (self._shards, self._experts, self._unknown)) or name in self._places

    def _target(self, name: str) -> str:
        base, slash, key = name.partition("/")
        base = self._experts.get(base, base)
        return (self._places[base].name if base in self._places else base) + slash + key


def _base(name: str) -> str:
    """Return the parameter's name in a state's name, without the state's key."""
    return name.partition("/")[0]
