"""Doctor: train under each layout in each world on two ranks, and run programs with known answers."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from equivcheck.layouts.composition.limits import repair_training
from equivcheck.layouts.composition.registry import layout_kinds
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.scenario import Axis, Data, Layer, Layout, Mesh, Model, Parallelism, Scenario, Training
from equivcheck.worlds import probes
from equivcheck.worlds.audit.found import Search
from equivcheck.worlds.audit.table import unclassified_names
from equivcheck.worlds.pool import LOCAL_WORLDS, ranks
from equivcheck.worlds.ranks import rerun_if_died

_NUM_RANKS = 2
_DEADLINE = 30.0

Runs = tuple[Callable[..., list[bool]], tuple[tuple[Any, ...], ...]]
"""A program that returns booleans, and a tuple with arguments for each run."""

PROGRAMS: dict[str, Runs] = {
    "redistributed tensors": (probes.check_redistributions, tuple((seed,) for seed in range(12))),
    "parameters sharded twice": (probes.check_double_sharding, (("linear", 5), ("embedding", 7))),
    "loss_parallel": (probes.check_loss_parallel, ((),)),
}
"""Programs that fail first if simulated ranks share torch's per-process state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Result of trying a layout or a program in one world."""

    world: str
    """World name."""
    subject: str
    """Tag of a parallelism, or a program's name."""
    works: bool
    """Whether the run succeeded, except for known issues."""
    reason: str
    """Reason for the failure; empty if the run succeeded."""
    known: str
    """Known upstream issue; empty if there is no such issue."""
    seconds: float
    """Duration in seconds, including the world's start."""


def probe_everything() -> Iterator[Probe]:
    """Try each layout and each test program in each world, one after another."""
    for world in LOCAL_WORLDS:
        for tag, kind in layout_kinds().items():
            yield probe(world, tag, kind.parallelism)
        for subject, runs in PROGRAMS.items():
            yield probe_program(world, subject, runs)


def unclassified_state(search: Search) -> list[str]:
    """Return the names of torch's process-wide variables that `states.toml` lacks. A newer torch version can add some."""
    return list(unclassified_names(search.names()))


def probe(world: str, tag: str, parallelism: type[Parallelism]) -> Probe:
    """Train the smallest model with a parallelism, for one step on two ranks in a world. Return whether it worked."""
    start = time.perf_counter()
    reason, known = _result(world, parallelism)
    return Probe(world=world, subject=tag, works=not reason, reason=reason, known=known, seconds=time.perf_counter() - start)


def probe_program(world: str, subject: str, runs: Runs) -> Probe:
    """Run the test program `subject` on ranks. Return whether all results were right.

    `runs` holds the program and the arguments for each run.
    """
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings say nothing about this machine
        reason = _wrong(world, runs)
    return Probe(world=world, subject=subject, works=not reason, reason=reason, known="", seconds=time.perf_counter() - start)


def _wrong(world: str, runs: Runs) -> str:
    program, choices = runs
    for arguments in choices:
        try:
            members = ranks(world, probes.NUM_RANKS)
            found = rerun_if_died(partial(members.run, program, *arguments, deadline=_DEADLINE)).values
        except Exception as error:
            return _line(error)
        wrong = [rank for rank, right in enumerate(found) if not all(right)]
        if wrong:
            return f"{program.__name__}{arguments} is wrong on ranks {wrong}"
    return ""


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _result(world: str, parallelism: type[Parallelism]) -> tuple[str, str]:
    try:
        from equivcheck.checking.check import check

        verdict = check(smallest_scenario(parallelism), world=world, deadline=_DEADLINE)
    except Exception as error:
        return _line(error), ""
    if verdict.outcome in (Outcome.EQUIVALENT, Outcome.KNOWN):
        return "", verdict.known
    return f"{verdict.outcome.value}: {verdict.reason}", ""


def smallest_scenario(parallelism: type[Parallelism]) -> Scenario:
    """Return a layout's smallest scenario: one step, two ranks on the parallelism's first axis, and as few layers as possible."""
    names = parallelism.axes[0]
    axes = tuple(Axis(name=name, size=1 if index else _NUM_RANKS) for index, name in enumerate(names))
    training = Training(model=Model(features=2, layers=(Layer(width=2),)), data=Data(microbatches=(_NUM_RANKS,)))
    layout = Layout(mesh=Mesh(axes=axes), parallelisms=(parallelism(),))
    return Scenario(training=repair_training(training, layout), layout=layout)
