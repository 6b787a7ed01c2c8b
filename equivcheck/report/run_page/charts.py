"""Where the lines and bars of a chart lie, in units of its drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 440, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 418, 22, 172
"""Edges of the area of the data, which leave room for the scales."""
_MAX_POINTS = 200
"""Of a line: no more can be told apart."""
_UNITS = ((3600.0, 2.0, "hours"), (60.0, 2.0, "minutes"), (1.0, 0.0, "seconds"))
"""Seconds of a unit of time, how many of it are enough to count in it, and its name."""
_DECADES = (-6, 1)
"""Powers of ten between which errors are shown: what is smaller is shown as the smallest."""
_BARS_PER_DECADE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A mark of a scale."""

    at: float
    """Where, along the scale."""
    text: str
    """What it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """How something grew with time."""

    points: tuple[tuple[float, float], ...]
    """Of the line, from the left to the right."""
    across: tuple[Tick, ...]
    """The scale of time."""
    unit: str
    """Of that scale."""
    up: tuple[Tick, ...]
    """The other scale."""
    last: str
    """The last value, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar of a histogram."""

    x: float
    """Its left edge."""
    y: float
    """Its upper edge."""
    width: float
    """From the left to the right."""
    text: str
    """What it stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """How often errors were how large, on a logarithmic scale."""

    bars: tuple[Bar, ...]
    """Those that are not empty."""
    across: tuple[Tick, ...]
    """The scale of errors, in units of tolerance."""
    up: tuple[Tick, ...]
    """The scale of checks."""
    tolerance: float
    """Where an error is as large as its tolerance."""


def line(points: Sequence[tuple[float, float]], *, most: float | None = None, unit: str = "") -> Line:
    """A line through values at seconds, from nothing at the beginning; as high as the largest value unless `most` is."""
    thinned = _thinned([(0.0, 0.0), *points])
    seconds = max(thinned[-1][0], 1e-9)
    highest = most or max(1.0, *(value for _, value in thinned))
    of, name = next((of, name) for of, enough, name in _UNITS if seconds >= of * enough)
    return Line(
        points=tuple((_x(at / seconds), _y(value / highest)) for at, value in thinned),
        across=tuple(Tick(at=_x(each * of / seconds), text=f"{each:g}") for each in steps(seconds / of)),
        unit=name,
        up=tuple(Tick(at=_y(each / highest), text=f"{each:,g}{unit}") for each in steps(highest)),
        last=f"{thinned[-1][1]:,.{1 if unit else 0}f}{unit}",
    )


def error_bars(sizes: Sequence[tuple[float, int]]) -> Bars:
    """A histogram of errors in units of tolerance, each with how many checks had it."""
    counts: dict[int, int] = {}
    first, last = (decade * _BARS_PER_DECADE for decade in _DECADES)
    for error, number in sizes:
        place = min(last - 1, max(first, math.floor(math.log10(max(error, 1e-300)) * _BARS_PER_DECADE)))
        counts[place] = counts.get(place, 0) + number
    highest = max(counts.values(), default=1)
    return Bars(
        bars=tuple(_bar(place, number, highest) for place, number in sorted(counts.items())),
        across=tuple(Tick(at=_log_x(decade), text=_power(decade)) for decade in range(_DECADES[0], _DECADES[1] + 1)),
        up=tuple(Tick(at=_y(each / highest), text=f"{each:,g}") for each in steps(highest) if each == int(each)),
        tolerance=_log_x(0),
    )


def steps(most: float) -> list[float]:
    """Three to six round numbers from 0 up to no more than `most`."""
    power = 10 ** math.floor(math.log10(most))
    width = next(power * step for step in (0.2, 0.5, 1, 2) if most / (power * step) <= 5.5)
    return [round(number * width, 9) for number in range(int(most / width + 1e-9) + 1)]


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    stride = math.ceil(len(points) / _MAX_POINTS)
    return [*points[:-1:stride], points[-1]]


def _bar(place: int, number: int, highest: int) -> Bar:
    low, high = (10 ** (edge / _BARS_PER_DECADE) for edge in (place, place + 1))
    left, right = _log_x(place / _BARS_PER_DECADE), _log_x((place + 1) / _BARS_PER_DECADE)
    text = f"{low:.2g} to {high:.2g}: {number:,}"
    return Bar(x=left, y=min(_y(number / highest), BOTTOM - 1.0), width=round(right - left - 1.5, 2), text=text)


def _log_x(power: float) -> float:
    return _x((power - _DECADES[0]) / (_DECADES[1] - _DECADES[0]))


def _power(decade: int) -> str:
    text = f"{10.0**decade:g}" if decade > -4 else f"1e{decade}"
    return f"≤{text}" if decade == _DECADES[0] else text


def _x(share: float) -> float:
    return round(LEFT + share * (RIGHT - LEFT), 2)


def _y(share: float) -> float:
    return round(BOTTOM - share * (BOTTOM - TOP), 2)
