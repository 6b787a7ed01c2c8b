"""A process's rank and world size, from the environment variables that torchrun or another launcher sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from equivcheck.errors import UsageError

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torch reads for ``env://``."""
_HOW = "start it by torchrun, as in `torchrun --nnodes 2 --nproc-per-node 2 ... -m equivcheck check FILE --world torchrun`"
_SLURM = (
    "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS MASTER_ADDR=<host of task 0> MASTER_PORT=<free port>"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Rank and world size of one process."""

    rank: int
    """Global rank, from 0."""
    size: int
    """World size."""


def place_of(environment: Mapping[str, str]) -> Place:
    """Read rank and world size from the environment variables of torchrun or another launcher.

    Raises `UsageError` if they are not set.
    """
    missing = [name for name in NAMES if not environment.get(name)]
    if missing and "SLURM_PROCID" in environment:
        raise UsageError(
            f"world torchrun: {', '.join(missing)} not set: torch does not read Slurm's variables. "
            f"Expected torchrun on each node, or in each task the command: export {_SLURM}"
        )
    if missing:
        raise UsageError(f"world torchrun: {', '.join(missing)} not set: no launcher has started this world. Expected: {_HOW}")
    rank, size = _number(environment, "RANK", least=0), _number(environment, "WORLD_SIZE", least=1)
    if rank >= size:
        raise UsageError(f"RANK {rank} is not valid for WORLD_SIZE {size}. Expected 0 to {size - 1}.")
    return Place(rank=rank, size=size)


def is_first_rank(environment: Mapping[str, str]) -> bool:
    """Whether this process should print. True on rank 0, and if the environment variables contain no rank."""
    return environment.get("RANK", environment.get("SLURM_PROCID", "0")) in ("", "0")


def _number(environment: Mapping[str, str], name: str, *, least: int) -> int:
    text = environment[name]
    if not (text.isdecimal() and int(text) >= least):
        raise UsageError(f"{name} {text!r:.40} is not valid. Expected a number, at least {least}.")
    return int(text)
