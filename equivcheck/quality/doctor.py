"""What works here: every layout in every world, really run on two ranks, and programs whose answer is known."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from equivcheck.layouts.composition.limits import repaired
from equivcheck.layouts.composition.registry import layout_kinds
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.scenario import Axis, Data, Layer, Layout, Mesh, Model, Parallelism, Scenario, Training
from equivcheck.worlds import probes
from equivcheck.worlds.audit.found import Search
from equivcheck.worlds.audit.table import unclassified
from equivcheck.worlds.pool import COMPARABLE, ranks
from equivcheck.worlds.ranks import again_if_died

_NUM_RANKS = 2
_DEADLINE = 30.0

Runs = tuple[Callable[..., list[bool]], tuple[tuple[Any, ...], ...]]
"""A program that says what is right, and the arguments that it is run with."""

PROGRAMS: dict[str, Runs] = {
    "redistributed tensors": (probes.redistributed, tuple((seed,) for seed in range(12))),
    "parameters cut twice": (probes.sharded_twice, (("linear", 5), ("embedding", 7))),
    "loss_parallel": (probes.in_loss_parallel, ((),)),
}
"""What goes wrong first where ranks as threads share what torch keeps for a process: sim must be right where gloo is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One subject in one world."""

    world: str
    """Name of the world."""
    subject: str
    """Tag of a parallelism, or what a program tries whose answer is known."""
    works: bool
    """Whether the smallest training, or the program, ran, and nothing was wrong with it that is not on file."""
    reason: str
    """Why not; empty if it works."""
    known: str
    """The known upstream issue that it shows; empty if none."""
    seconds: float
    """Time of the check, the start of the world included."""


def probe_everything() -> Iterator[Probe]:
    """Each layout and each program in each world, one after the other."""
    for world in COMPARABLE:
        for tag, kind in layout_kinds().items():
            yield probe(world, tag, kind.parallelism)
        for subject, runs in PROGRAMS.items():
            yield probe_program(world, subject, runs)


def unclassified_state(search: Search) -> list[str]:
    """What this torch keeps for the process and nobody has looked at yet, as on a version that is newer than this checker."""
    return list(unclassified(search.names()))


def probe(world: str, tag: str, parallelism: type[Parallelism]) -> Probe:
    """Train the smallest model once on two ranks; whatever goes wrong is the reason."""
    start = time.perf_counter()
    reason, known = _result(world, parallelism)
    return Probe(world=world, subject=tag, works=not reason, reason=reason, known=known, seconds=time.perf_counter() - start)


def probe_program(world: str, subject: str, runs: Runs) -> Probe:
    """Run a program with each of some arguments; what it finds wrong, or raises, is the reason."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch warns of there is no news about this machine
        reason = _wrong(world, runs)
    return Probe(world=world, subject=subject, works=not reason, reason=reason, known="", seconds=time.perf_counter() - start)


def _wrong(world: str, runs: Runs) -> str:
    program, choices = runs
    for arguments in choices:
        try:
            members = ranks(world, probes.NUM_RANKS)
            found = again_if_died(partial(members.run, program, *arguments, deadline=_DEADLINE)).values
        except Exception as error:
            return _line(error)
        wrong = [rank for rank, right in enumerate(found) if not all(right)]
        if wrong:
            return f"{program.__name__}{arguments} is wrong on ranks {wrong}"
    return ""


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _result(world: str, parallelism: type[Parallelism]) -> tuple[str, str]:
    """Why it does not work, and what is known about it."""
    try:
        from equivcheck.checking.check import check

        verdict = check(smallest(parallelism), world=world, deadline=_DEADLINE)
    except Exception as error:
        return _line(error), ""
    if verdict.outcome in (Outcome.EQUIVALENT, Outcome.KNOWN):
        return "", verdict.known
    return f"{verdict.outcome.value}: {verdict.reason}", ""


def smallest(parallelism: type[Parallelism]) -> Scenario:
    """One layer (or as many as the layout needs), one step, two ranks along the parallelism's first axis and one along others."""
    names = parallelism.axes[0]
    axes = tuple(Axis(name=name, size=1 if index else _NUM_RANKS) for index, name in enumerate(names))
    training = Training(model=Model(features=2, layers=(Layer(width=2),)), data=Data(microbatches=(_NUM_RANKS,)))
    layout = Layout(mesh=Mesh(axes=axes), parallelisms=(parallelism(),))
    return Scenario(training=repaired(training, layout), layout=layout)
