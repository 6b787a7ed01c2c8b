"""Computes coordinates for charts, in SVG units."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 440, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 418, 22, 172
"""Edges of the data area, with room for the scales."""
_MAX_POINTS = 200
"""Maximum number of points per line, because more cannot be seen."""
_UNITS = ((3600.0, 2.0, "hours"), (60.0, 2.0, "minutes"), (1.0, 0.0, "seconds"))
"""Time units: seconds per unit, smallest number for which the unit is used, and its name."""
_DECADES = (-6, 1)
"""Powers of ten for errors. Smaller errors are drawn at the smallest power."""
_BARS_PER_DECADE = 4
_POWERS = (-6.0, 18.0)
"""Powers of ten for a logarithmic scale. Values outside the scale are drawn at its ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A labelled mark on a chart's axis."""

    at: float
    """Position along the axis, in SVG units."""
    text: str
    """The mark's label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Chart with one value over time."""

    points: tuple[tuple[float, float], ...]
    """The line's points, left to right."""
    across: tuple[Tick, ...]
    """Marks on the time axis."""
    unit: str
    """The time axis's unit."""
    up: tuple[Tick, ...]
    """Marks on the value axis."""
    last: str
    """Last value, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar in a histogram of errors."""

    x: float
    """Left edge."""
    y: float
    """Upper edge."""
    width: float
    """Width in SVG units."""
    text: str
    """The bar's range, and how many checks are in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Histogram with errors on a logarithmic axis."""

    bars: tuple[Bar, ...]
    """Bars for ranges with at least one check."""
    across: tuple[Tick, ...]
    """Marks on the axis with errors relative to tolerance."""
    up: tuple[Tick, ...]
    """Marks on the axis with check counts."""
    tolerance: float
    """Position on the error axis for an error equal to its tolerance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One curve in a chart over steps."""

    name: str
    """Text in the legend."""
    points: tuple[tuple[float, float], ...]
    """Points, left to right, without unknown values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Chart with several curves over steps."""

    curves: tuple[Curve, ...]
    """Curves in the order given."""
    across: tuple[Tick, ...]
    """Marks on the step axis."""
    up: tuple[Tick, ...]
    """Marks on the value axis."""
    one: float | None
    """Position of the value 1 on a logarithmic axis; None on a linear one."""


def stack_parts(parts: Mapping[str, float], most: float) -> tuple[tuple[str, float, float], ...]:
    """Return the nonempty parts of a stacked bar, each as CSS class, start and width.

    Widths are percentages of the amount `most`.
    """
    found, begin = [], 0.0
    for name, amount in parts.items():
        width = 100 * amount / most if most else 0.0
        if width:
            found.append((name, round(begin, 2), round(width, 2)))
        begin += width
    return tuple(found)


def line(points: Sequence[tuple[float, float]], *, most: float | None = None, unit: str = "") -> Line:
    """Return a chart with a line through `points` (seconds, value), beginning at 0.

    The value axis ends at `most`, or at the largest value.
    """
    thinned = _thinned([(0.0, 0.0), *points])
    seconds = max(thinned[-1][0], 1e-9)
    highest = most or max(1.0, *(value for _, value in thinned))
    of, name = next((of, name) for of, enough, name in _UNITS if seconds >= of * enough)
    return Line(
        points=tuple((_x(at / seconds), _y(value / highest)) for at, value in thinned),
        across=tuple(Tick(at=_x(each * of / seconds), text=f"{each:g}") for each in round_steps(seconds / of)),
        unit=name,
        up=tuple(Tick(at=_y(each / highest), text=f"{each:,g}{unit}") for each in round_steps(highest)),
        last=f"{thinned[-1][1]:,.{1 if unit else 0}f}{unit}",
    )


def plot(series: Mapping[str, Sequence[float | None]], *, log: bool = False) -> Plot:
    """Return a chart with a curve for each series, over steps from 0. None values are left out.

    On a logarithmic axis, zero is at its lower end and infinity at its upper end.
    """
    num_steps = max(map(len, series.values()))
    values = {
        name: [(at, _decades(value) if log else value) for at, value in enumerate(found) if value is not None]
        for name, found in series.items()
    }
    finite = [value for found in values.values() for _, value in found if math.isfinite(value)]
    low, high = _range(finite, log=log)
    return Plot(
        curves=tuple(
            Curve(name=name, points=tuple(_point(at, value, num_steps, low, high) for at, value in found))
            for name, found in values.items()
        ),
        across=tuple(Tick(at=_step_x(at, num_steps), text=str(at)) for at in range(0, num_steps, math.ceil(num_steps / 10))),
        up=tuple(Tick(at=_y((each - low) / (high - low)), text=_label(each, log=log)) for each in _marks(low, high, log=log)),
        one=_y(-low / (high - low)) if log else None,
    )


def _decades(value: float) -> float:
    low, high = _POWERS
    return high if not math.isfinite(value) else min(high, max(low, math.log10(max(value, 1e-300))))


def _range(values: Sequence[float], *, log: bool) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=0.0)
    if log:
        return math.floor(min(low, -1.0)), math.ceil(max(high, 1.0))
    is_wide = _label(low, log=log) != _label(high, log=log)
    return (low, high) if is_wide else (low - (abs(low) / 2 or 1.0), high + (abs(high) / 2 or 1.0))


def _marks(low: float, high: float, *, log: bool) -> list[float]:
    if not log:
        return [low, (low + high) / 2, high]
    stride = math.ceil((high - low) / 6)
    return [power for power in range(int(low), int(high) + 1) if power % stride == 0]


def _label(value: float, *, log: bool) -> str:
    return f"{value:.4g}" if not log else f"{10.0**value:g}" if -4 < value < 4 else f"1e{value:g}"


def _point(at: int, value: float, num_steps: int, low: float, high: float) -> tuple[float, float]:
    return _step_x(at, num_steps), _y((value - low) / (high - low) if math.isfinite(value) else 1.0)


def _step_x(step: int, num_steps: int) -> float:
    return _x(step / (num_steps - 1) if num_steps > 1 else 0.5)


def error_bars(sizes: Sequence[tuple[float, int]]) -> Bars:
    """Return a histogram with errors. `sizes` are pairs (error relative to tolerance, check count)."""
    counts: dict[int, int] = {}
    first, last = (decade * _BARS_PER_DECADE for decade in _DECADES)
    for error, number in sizes:
        place = min(last - 1, max(first, math.floor(math.log10(max(error, 1e-300)) * _BARS_PER_DECADE)))
        counts[place] = counts.get(place, 0) + number
    highest = max(counts.values(), default=1)
    return Bars(
        bars=tuple(_bar(place, number, highest) for place, number in sorted(counts.items())),
        across=tuple(Tick(at=_log_x(decade), text=_power(decade)) for decade in range(_DECADES[0], _DECADES[1] + 1)),
        up=tuple(Tick(at=_y(each / highest), text=f"{each:,g}") for each in round_steps(highest) if each == int(each)),
        tolerance=_log_x(0),
    )


def round_steps(most: float) -> list[float]:
    """Return three to six round numbers from 0 to `most`."""
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
