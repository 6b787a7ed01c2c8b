"""What a fixed set of scenarios gives: verdicts and bits, in this process or in a fresh one."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from equivcheck.checking.check import check
from equivcheck.layouts.composition.running import Runner
from equivcheck.oracle.reference import reference
from equivcheck.scenario import (
    DDP,
    FSDP2,
    ActivationSharding,
    AdamW,
    Axis,
    Data,
    Layer,
    LayerPlan,
    Layout,
    Mesh,
    Model,
    Parallelism,
    Scenario,
    Split,
    TensorParallel,
    Training,
)
from equivcheck.worlds.pool import close_worlds
from equivcheck.worlds.trace.moments import moments

Results = dict[str, list[str]]
"""By parallelism: the verdict's outcome, its worst error, a digest of all bits that ranks leave."""


def _scenario(parallelism: Parallelism) -> Scenario:
    model = Model(features=3, layers=(Layer(width=4), Layer(width=2)))
    training = Training(model=model, data=Data(microbatches=(4,)), optimizer=AdamW(), steps=2)
    axis = "tp" if isinstance(parallelism, TensorParallel) else "dp"
    return Scenario(training=training, layout=Layout(mesh=Mesh(axes=(Axis(name=axis, size=2),)), parallelisms=(parallelism,)))


PLAN = (LayerPlan(split=Split.COLWISE, output=ActivationSharding.FEATURES), LayerPlan(split=Split.ROWWISE))
SCENARIOS = {type(each).__name__: _scenario(each) for each in (DDP(), FSDP2(), TensorParallel(plan=PLAN))}


def results(world: str) -> Results:
    """What the scenarios give in this process, with nothing remembered of the run on one device."""
    for remembered in (reference._reference, reference._confirming_reference):
        remembered.cache_clear()
    return {name: _result(scenario, world) for name, scenario in SCENARIOS.items()}


def _result(scenario: Scenario, world: str) -> list[str]:
    verdict = check(scenario, world=world)
    bits = hashlib.sha256()
    for trace in Runner(world=world, deadline=60.0).run(scenario).run.values:
        for moment in moments(trace):
            bits.update(moment.snapshot.values.tobytes())
    return [f"{verdict.outcome.value} {verdict.reason}", repr(verdict.worst_error), bits.hexdigest()]


@cache
def of_fresh_process(world: str) -> Results:
    """What they give in a process that has done nothing else."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    command = [sys.executable, "-c", f"from isolation.fixed import main; main({world!r})"]
    ran = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, check=True)
    found: Results = json.loads(ran.stdout)
    return found


def main(world: str) -> None:
    """In a fresh process: print what they give."""
    print(json.dumps(results(world)))
    close_worlds()
