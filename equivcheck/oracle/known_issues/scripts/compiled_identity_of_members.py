"""What is compiled for one member of an enum is taken for another: comparisons by `is` are folded without a guard.

As in https://github.com/pytorch/pytorch/issues/196173, where the objects are no members of an enum. Two attributes are compared
with the same member: for the second no guard is installed.

    torchrun --standalone --nproc-per-node 1 compiled_identity_of_members.py

Exit code 1 when it shows. Seen on torch 2.13, CPU.
"""

import sys
from dataclasses import dataclass
from enum import Enum

import torch


class Place(Enum):
    """Where something is."""

    HERE = "here"
    THERE = "there"


@dataclass(frozen=True)
class Route:
    """From a place to another."""

    source: Place
    target: Place


def length(values: torch.Tensor, route: Route) -> torch.Tensor:
    """Zero for staying here, 2 for leaving, 1 for coming back."""
    if route.source is Place.HERE:
        return values * (0 if route.target is Place.HERE else 2)
    return values * (1 if route.target is Place.HERE else 0)


def main() -> int:
    """Follow two routes, compiled and as it is."""
    compiled, one = torch.compile(length, backend="eager"), torch.ones(())
    routes = (Route(Place.THERE, Place.THERE), Route(Place.THERE, Place.HERE))
    found = [[float(follow(one, route)) for route in routes * 2] for follow in (length, compiled)]
    print("compiled", found[1], "expected", found[0])
    worst = max(abs(eager - made) for eager, made in zip(*found, strict=True))
    print(f"max difference {worst}")
    return int(worst != 0)


if __name__ == "__main__":
    sys.exit(main())
