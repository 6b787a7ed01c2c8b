"""Default process group of the torchrun world: the script's own group, or a group created here and destroyed with the world.

Private torch API: the default group's store; tested with torch 2.9, 2.13 and 2.15.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from equivcheck.errors import UsageError
from equivcheck.worlds.failure import RanksDidNotStart
from equivcheck.worlds.torchrun.links import START_SECONDS
from equivcheck.worlds.torchrun.place import Place, place_of

_NEVER = timedelta(days=1)
"""Time limit of the group, long because `Patience` decides when ranks count as hung."""


def own_place() -> Place:
    """Return this process's rank and the world size, from the default group or from torchrun's environment variables.

    Raises `UsageError` if the group does not use gloo on the CPU, or if the variables are not set.
    """
    if not dist.is_initialized():
        return place_of(os.environ)
    backend = str(dist.get_backend_config())
    if "cpu:gloo" not in backend:
        raise UsageError(
            f"process group {backend} is not valid for world torchrun: checks train on the CPU over gloo. "
            "Expected init_process_group('cpu:gloo,cuda:nccl') or init_process_group('gloo')."
        )
    return Place(rank=dist.get_rank(), size=dist.get_world_size())


def world_store(place: Place) -> Any:
    """Return torch's key-value store, shared by all processes of the torchrun world."""
    # There is no public getter for the store behind an initialized default group.
    return c10d._get_default_store() if dist.is_initialized() else _store_of_environment(place)


@cache
def _store_of_environment(place: Place) -> Any:
    """Return the store from the environment, kept until the process ends because rank 0 may be its server."""
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=START_SECONDS)))  # type: ignore[attr-defined]
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RanksDidNotStart(f"world torchrun: rank {place.rank} cannot use the store at {address}: {error}") from error
    return store


def make_group(name: str) -> None:
    """Create the default group. Its keys in the store begin with `name`, so they differ from other worlds' keys.

    Every rank calls this function.
    """
    place = place_of(os.environ)
    store = dist.PrefixStore(name, world_store(place))  # type: ignore[attr-defined]
    dist.init_process_group(_backend(), store=store, rank=place.rank, world_size=place.size, timeout=_NEVER)


def end_group() -> None:
    """Destroy the default group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _backend() -> str:
    """Return gloo for checks, which train on the CPU, and NCCL if there are GPUs that a program may use itself."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
