"""The issue reports it for other objects; enum members have it, too. If two attributes are compared with the same member, the
second comparison gets no guard.
"""

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


def main() -> float:
    """Follow two routes, compiled and as it is."""
    compiled, one = torch.compile(length, backend="eager"), torch.ones(())
    routes = (Route(Place.THERE, Place.THERE), Route(Place.THERE, Place.HERE))
    found = [[float(follow(one, route)) for route in routes * 2] for follow in (length, compiled)]
    print("compiled", found[1], "expected", found[0])
    return max(abs(eager - made) for eager, made in zip(*found, strict=True))
