"""Pages of findings, made of scenarios with a mutant planted in them."""

from __future__ import annotations

from pathlib import Path

from equivcheck.checking.check import check
from equivcheck.diagnosis.explain import explained
from equivcheck.mutants.registry import mutant
from equivcheck.oracle.verdict.verdict import Verdict
from equivcheck.report.finding_page.page import PageContext, write_scenario_page
from equivcheck.report.finding_page.second_run import run_once_more
from equivcheck.scenario import (
    DDP,
    FSDP2,
    AdamW,
    Axis,
    Data,
    Layer,
    LayerPlan,
    Layout,
    Mesh,
    Model,
    Scenario,
    Split,
    TensorParallel,
    Training,
)

PLAN = (LayerPlan(split=Split.COLWISE), LayerPlan(split=Split.ROWWISE))


def on_a_grid(steps: int = 3) -> Scenario:
    """FSDP2 over tensor parallelism on four ranks."""
    model = Model(features=6, layers=(Layer(width=8), Layer(width=4)))
    training = Training(model=model, data=Data(microbatches=(4,)), optimizer=AdamW(), steps=steps)
    mesh = Mesh(axes=(Axis(name="dp", size=2), Axis(name="tp", size=2)))
    return Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=(TensorParallel(plan=PLAN), FSDP2())))


def under_ddp(steps: int = 1, ranks: int = 2) -> Scenario:
    """A small one of DDP."""
    training = Training(model=Model(features=2, layers=(Layer(width=3),)), data=Data(microbatches=(ranks,)), steps=steps)
    return Scenario(training=training, layout=Layout(mesh=Mesh(axes=(Axis(name="dp", size=ranks),)), parallelisms=(DDP(),)))


def page_of(file: Path, scenario: Scenario, planted: str = "", *, why: bool = False, script: str = "") -> Verdict:
    """Write the page of a scenario, with a mutant planted if one is named; the diagnosis is worked out if asked for."""
    alter = mutant(planted).plant if planted else None
    verdict = check(scenario, alter=alter)
    if why:
        verdict = explained(verdict, alter=alter)
    told = PageContext(
        script=script, why_no_script="" if script else "it was not asked for", commands=("equivcheck check scenario.json",)
    )
    write_scenario_page(file, verdict, run_once_more(verdict, alter), told)
    return verdict
