"""Reads a rank's shards of `FullyShardedDataParallel`'s flat parameters.

Uses private torch API (`FlatParamHandle`); tested with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from equivcheck.scenario import ClipNorm
from equivcheck.training.read import box_of, canonical_name
from equivcheck.worlds.trace.trace import Piece, Slot


def clip_flat(module: FullyShardedDataParallel, clipping: ClipNorm) -> torch.Tensor:
    """Clip gradients over all ranks with `clip_grad_norm_` of the root module. Returns the norm before clipping."""
    return module.clip_grad_norm_(clipping.max_norm, norm_type=float(clipping.norm_type.value))


def flat_slots(root: nn.Module) -> tuple[Slot, ...]:
    """Return one `Slot` for each original parameter. Without `use_orig_params`, return one for each flat parameter."""
    slots: list[Slot] = []
    for prefix, handle in _handles(root):
        pieces = [_piece(handle, index, prefix) for index in range(handle.flat_param._num_params)]
        if handle._use_orig_params:
            originals = zip(handle.flat_param._params, pieces, strict=True)
            slots += [Slot(parameter=parameter, pieces=(piece,)) for parameter, piece in originals]
        else:
            slots.append(Slot(parameter=handle.flat_param, pieces=_padded(handle, pieces)))
    return tuple(slots)


def release(root: FullyShardedDataParallel) -> None:
    """Remove the flat parameters' references to modules, so that the modules can be freed.

    A C++ hook can keep a flat parameter alive forever.
    """
    for _, handle in list(_handles(root)):
        handle.flat_param.__dict__.clear()


def _handles(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each unit's handle with its canonical name prefix, in the single-device optimizer's order."""
    for name, unit in root.named_modules():
        if isinstance(unit, FullyShardedDataParallel) and unit._handle is not None:
            prefix = canonical_name(f"{name}." if name else "")
            yield prefix, unit._handle


def _piece(handle: Any, index: int, prefix: str) -> Piece:
    flat = handle.flat_param
    box = _box(canonical_name(prefix + flat._fqns[index]), tuple(flat._shapes[index]), flat._param_extensions[index])
    if not handle.uses_sharded_strategy:
        return box
    held = flat._shard_param_infos[index]
    return replace(box, run=(held.intra_param_start_idx, held.numel_in_shard) if held.in_shard else (0, 0))


def _box(name: str, local: tuple[int, ...], spec: Any) -> Piece:
    """Return the piece that a unit's ranks hold together: a full parameter, or a tensor-parallel shard."""
    if spec is None:
        return Piece(name=name, shape=local)
    return box_of(name, tuple(spec.shape), spec.mesh, spec.placements)


def _padded(handle: Any, pieces: list[Piece]) -> tuple[Piece, ...]:
    """Return a flat parameter's pieces without alignment, and the padding at its shard's end."""
    total, ends = handle.flat_param.numel(), list(accumulate((piece.numel for piece in pieces), initial=0))
    placed = [replace(piece, place=(start, total)) for piece, start in zip(pieces, ends, strict=False)]
    rest = total - ends[-1]
    return (*placed, Piece(name="", shape=(rest,))) if rest else tuple(placed)
