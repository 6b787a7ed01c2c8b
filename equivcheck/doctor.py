"""What works here: every layout in every world, really run on two ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from equivcheck.layouts.registry import layout_kinds, mended
from equivcheck.oracle.verdict import Outcome
from equivcheck.scenario import Axis, Data, Layer, Layout, Mesh, Model, Parallelism, Scenario, Training
from equivcheck.worlds.pool import COMPARABLE

_NUM_RANKS = 2
_DEADLINE = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One layout in one world."""

    world: str
    """Name of the world."""
    layout: str
    """Tag of the parallelism."""
    works: bool
    """Whether the smallest training ran, and nothing was wrong with it that is not on file."""
    reason: str
    """Why not; empty if it works."""
    known: str
    """The known upstream issue that it shows; empty if none."""
    seconds: float
    """Time of the check, the start of the world included."""


def probe_everything() -> Iterator[Probe]:
    """Each layout in each world, one after the other."""
    for world in COMPARABLE:
        for tag, kind in layout_kinds().items():
            yield probe(world, tag, kind.parallelism)


def probe(world: str, tag: str, parallelism: type[Parallelism]) -> Probe:
    """Train the smallest model once on two ranks; whatever goes wrong is the reason."""
    start = time.perf_counter()
    reason, known = _result(world, parallelism)
    return Probe(world=world, layout=tag, works=not reason, reason=reason, known=known, seconds=time.perf_counter() - start)


def _result(world: str, parallelism: type[Parallelism]) -> tuple[str, str]:
    """Why it does not work, and what is known about it."""
    try:
        from equivcheck.oracle.check import check

        verdict = check(smallest(parallelism), world=world, deadline=_DEADLINE)
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split()), ""
    if verdict.outcome in (Outcome.EQUIVALENT, Outcome.KNOWN):
        return "", verdict.known
    return f"{verdict.outcome.value}: {verdict.reason}", ""


def smallest(parallelism: type[Parallelism]) -> Scenario:
    """One layer (or as many as the layout needs), one step, two ranks along the parallelism's first axis and one along others."""
    names = parallelism.axes[0]
    axes = tuple(Axis(name=name, size=1 if index else _NUM_RANKS) for index, name in enumerate(names))
    training = Training(model=Model(features=2, layers=(Layer(width=2),)), data=Data(microbatches=(_NUM_RANKS,)))
    layout = Layout(mesh=Mesh(axes=axes), parallelisms=(parallelism(),))
    return Scenario(training=mended(training, layout), layout=layout)
