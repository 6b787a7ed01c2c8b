"""The issue reports it for other objects; enum members have it, too. If two attributes are compared with the same member, the
second comparison gets no guard.
"""

from dataclasses import dataclass
from enum import Enum

import torch


class Place(Enum):
    """Two ends that a route can have."""

    HERE = "here"
    THERE = "there"


@dataclass(frozen=True)
class Route:
    """Frozen value with two enum members. `length` compares both with the same member."""

    source: Place
    target: Place


def length(values: torch.Tensor, route: Route) -> torch.Tensor:
    """Return `values` times 0 from `HERE` to `HERE`, times 2 from `HERE` to `THERE`, and times 1 from `THERE` to `HERE`."""
    if route.source is Place.HERE:
        return values * (0 if route.target is Place.HERE else 2)
    return values * (1 if route.target is Place.HERE else 0)


def main() -> float:
    """Compute the lengths of two routes with compiled and with eager code, and return the difference."""
    compiled, one = torch.compile(length, backend="eager"), torch.ones(())
    routes = (Route(Place.THERE, Place.THERE), Route(Place.THERE, Place.HERE))
    found = [[float(follow(one, route)) for route in routes * 2] for follow in (length, compiled)]
    print("compiled", found[1], "expected", found[0])
    return max(abs(eager - made) for eager, made in zip(*found, strict=True))
