"""The property of exported scripts: they print the differences that a check finds, and exit as its outcome says."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from equivcheck import Outcome, Scenario, check
from equivcheck.export.bugs.refused import REASONS
from equivcheck.export.mutants import expressible
from equivcheck.export.script import can_export, script_of
from equivcheck.export.tolerance import tolerance_of
from equivcheck.layouts.base.script.draft import CannotExport
from equivcheck.layouts.base.script.numbers import Numbers
from equivcheck.mutants.mutant import Family, Mutant
from equivcheck.mutants.registry import mutants
from equivcheck.scenario import DDP, Axis, Data, Layer, Layout, Mesh, Model, Precision, Training
from equivcheck.strategies import scenarios
from equivcheck.worlds.trace import differences as verdicts
from mutants.minimums import MINIMUMS
from support.exported import Differences, differences_of_traces, printed_differences
from support.supported import require_supported

EXAMPLES = max(4, settings().max_examples // 25)
"""Scenarios that are run as they are, and that have a mutant planted."""
UNHURRIED = settings(deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate), suppress_health_check=list(HealthCheck))
WRONG = (Outcome.DIVERGED, Outcome.CRASHED, Outcome.HUNG, Outcome.KNOWN)
COMPARED = (verdicts.Phase.LOSS, verdicts.Phase.GRADIENT, verdicts.Phase.CLIPPING, verdicts.Phase.UPDATE)
DIGITS = {Precision.FLOAT64: 1e-9, Precision.FLOAT32: 1e-3}
"""How much of a large difference may be rounding: both worlds sum in orders of their own, and steps make it more."""


@pytest.fixture(autouse=True)
def _tolerate_torch_warnings() -> Iterator[None]:
    """What torch warns of in a generated scenario is not what is tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def agrees(scenario: Scenario, folder: Path, mutant: Mutant | None = None) -> bool:
    """Run the script of a scenario; False where none can be written, or where the check says nothing that a script compares."""
    plant = None if mutant is None else mutant.plant
    verdict = check(scenario, alter=plant)
    if verdict.outcome is Outcome.INCONCLUSIVE or verdict.undecided:
        return False
    if verdict.divergence is not None and verdict.divergence.phase not in COMPARED:
        return False
    try:
        script = script_of(scenario, verdict=verdict, mutant=mutant, numbers=Numbers.EXACT)
    except CannotExport:
        return False
    code, printed, output = printed_differences(script, scenario.layout.mesh.num_ranks, folder)
    assert code == int(verdict.outcome in WRONG), f"{verdict.reason}\n{output}\n{script}"
    if verdict.failure is None:
        with default_element_type(scenario.training.precision):
            judge(scenario, differences_of_traces(scenario, plant), printed)
    return True


@contextlib.contextmanager
def default_element_type(precision: Precision) -> Iterator[None]:
    """As scripts set it: NAdam and ASGD keep numbers in it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, precision.value))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def judge(scenario: Scenario, found: Differences, printed: Differences) -> None:
    """Both sides name the same tensors, and differ by rounding."""
    assert sorted(found) == sorted(printed)
    rounding = 2 * tolerance_of(scenario)
    for place, difference in found.items():
        if difference != printed[place]:
            allowed = rounding + DIGITS[scenario.training.precision] * max(difference, printed[place])
            assert abs(difference - printed[place]) <= allowed, f"{place}: {difference} in the check, {printed[place]} printed"


def test_a_script_prints_what_the_check_finds(tmp_path: Path) -> None:
    """Honest trainings under any layout: the same tensors, as far from the single device as in the traces, and exit code 0."""
    ran: list[bool] = []

    @settings(UNHURRIED, max_examples=EXAMPLES)
    @given(scenarios(max_ranks=3))
    def equal(scenario: Scenario) -> None:
        ran.append(agrees(scenario, tmp_path))

    equal()
    assert sum(ran) > len(ran) / 2


def test_a_script_has_the_bug_of_a_mutant(tmp_path: Path) -> None:
    """With a mutant planted on both sides, too; the exit code is 1 where the check diverges."""
    ran: list[bool] = []
    planted = st.sampled_from([mutants()[name] for name in expressible() if mutants()[name].family is not Family.RUNTIME])

    @settings(UNHURRIED, max_examples=EXAMPLES)
    @given(planted.flatmap(lambda mutant: st.tuples(st.just(mutant), scenarios(layouts=mutant.layouts, max_ranks=2))))
    def equal(drawn: tuple[Mutant, Scenario]) -> None:
        mutant, scenario = drawn
        if mutant.applies(scenario):
            ran.append(agrees(scenario, tmp_path, mutant))

    equal()
    assert any(ran)


OF_LAYERS = (Family.TOKENS, Family.EXPERTS, Family.CONTEXT_PARALLEL)
"""Families of mutants of which each has lines of its own, or a reason why there are none."""
REPRESENTATIVES = {
    "router_weights_normalised_before_choice",
    "router_weighs_other_side",
    "rows_beyond_capacity_dropped",
    "causal_mask_by_order_of_ranks",
    "ring_gradients_overwritten",
    "labels_counted_by_each_part",
}
"""Of experts and of parts of sequences; the others run by night."""


def _of_layers() -> Iterator[Any]:
    for name in expressible():
        family = mutants()[name].family
        if family in (*OF_LAYERS, Family.PIPELINE):
            is_quick = family in (Family.TOKENS, Family.PIPELINE) or name in REPRESENTATIVES
            yield pytest.param(name, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize("name", [*_of_layers()])
def test_a_script_has_the_bug_of_a_mutant_of_layers(name: str, tmp_path: Path) -> None:
    """In the smallest scenario that shows it, the script prints the differences that the check finds."""
    require_supported(MINIMUMS[name])
    assert agrees(MINIMUMS[name], tmp_path, mutants()[name])


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, mutant in mutants().items()
        if mutant.family in OF_LAYERS and name not in expressible() and can_export(MINIMUMS[name])
    ],
)
def test_a_mutant_of_layers_that_no_script_has_is_refused_with_the_reason(name: str) -> None:
    """Whoever asks for one is told what a script has no line for."""
    with pytest.raises(CannotExport, match=re.escape(f"mutant {name!r} cannot be exported: {REASONS[name]}; allowed: ")):
        script_of(MINIMUMS[name], mutant=mutants()[name])


def test_a_script_of_a_failing_rank_fails_too(tmp_path: Path) -> None:
    """What a rank raises is printed with its traceback, and the exit code is 1."""
    axes = (Axis(name="dp", size=2),)
    training = Training(model=Model(features=1, layers=(Layer(width=1),)), data=Data(microbatches=(2,)))
    scenario = Scenario(training=training, layout=Layout(mesh=Mesh(axes=axes), parallelisms=(DDP(),)))
    mutant = mutants()["rank_raises"]
    verdict = check(scenario, alter=mutant.plant)

    script = script_of(scenario, verdict=verdict, mutant=mutant)
    code, differences, printed = printed_differences(script, 2, tmp_path)

    assert (verdict.outcome, code, differences) == (Outcome.CRASHED, 1, {})
    assert "What happens: rank 1 raised RuntimeError" in script
    assert "RuntimeError: rank 1 fails on purpose" in printed


LEAST_SHARE = 0.7
"""Of generated scenarios, those of which a script can be written."""
MANY = max(80, settings().max_examples)


def test_most_scenarios_can_be_exported() -> None:
    """At least 70 % of generated scenarios can be written, numbers and tolerance left aside."""
    from equivcheck.export.script import can_export

    written: list[bool] = []

    @settings(UNHURRIED, max_examples=MANY)
    @given(scenarios())
    def counted(scenario: Scenario) -> None:
        written.append(can_export(scenario))

    counted()
    assert sum(written) >= LEAST_SHARE * len(written)
