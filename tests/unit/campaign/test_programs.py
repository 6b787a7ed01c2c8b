"""Campaigns of tensor programs, alone and beside trainings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from equivcheck.campaign.control import ProgramFault, applicable_faults, choose_control, program_faults
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.plan import Plan
from equivcheck.campaign.supervisor import fuzz
from equivcheck.campaign.workers.turns import LEAST_SHARE, MOST_SHARE, Turns
from equivcheck.checking import cases
from equivcheck.checking.cases import check_case
from equivcheck.mutants.mutant import Mutant
from equivcheck.programs.deadline import PROGRAM_SECONDS
from equivcheck.programs.nouns import Leaf, TensorProgram
from equivcheck.report.campaign.summary_object import summary_object
from unit.campaign import fakes

pytestmark = pytest.mark.usefixtures("workers_are_forked")

PLAN = Plan(
    num_checks=60,
    seed=0,
    strategy=None,
    programs=fakes.some_programs,
    check=fakes.softmax_diverges,
    controls=program_faults,
    confirm=False,
)


def test_programs_are_drawn_counted_shrunk_and_kept(tmp_path: Path) -> None:
    """A finding is kept with its smallest program, and the summary counts programs as it counts layouts."""
    store = FindingStore(tmp_path)
    summary = fuzz(PLAN, store)
    (found,) = summary.findings
    assert found.verdict.case == fakes.program(1, "softmax") or found.verdict.case.num_ranks == 1
    assert len(found.verdict.case.statements) == 2  # type: ignore[attr-defined]
    assert store.load(found.fingerprint).verdict == found.verdict
    told = json.loads(json.dumps(summary_object(summary)))
    assert told["layouts"].keys() == {"tensor_program"}
    assert told["layouts"]["tensor_program"]["checks"] == told["checks"] == 60
    assert told["programs"]["reached"] == 4
    assert told["findings"][0]["layout"] == "tensor_program"
    assert summary.control is not None
    assert summary.control.caught
    assert summary.control.name == program_faults(PLAN)[0].name


def test_a_seed_decides_what_a_mixed_campaign_checks() -> None:
    """Programs have between a tenth and a half of the expected time, whatever the clock says."""
    plan = replace(PLAN, strategy=fakes.some_scenarios, programs=fakes.some_programs)
    assert turns(plan, new=True) == turns(plan, new=True)
    for new, share in ((True, MOST_SHARE), (False, LEAST_SHARE)):
        found = turns(plan, new=new)
        assert abs(sum(found) / len(found) - share) < 0.1


def turns(plan: Plan, *, new: bool) -> list[bool]:
    """Of batches of one check that take as long, which are of programs; where only programs of the first batches may be new."""
    turns, found = Turns(plan, 0), []
    for number in range(200):
        turns.next()
        part = turns.parts[turns.is_of_programs]
        part.seconds = 1.0
        turns.count(fakes.program(1, "exp") if turns.is_of_programs else fakes.scenario(width=number % 32 + 1))
        part.end_batch()
        part.gain = float(new or not turns.is_of_programs)
        found.append(turns.is_of_programs)
    return found


def test_a_mixed_campaign_checks_both_kinds(tmp_path: Path) -> None:
    """Each is in the tally under its name."""
    plan = replace(PLAN, strategy=fakes.some_scenarios, num_checks=400)
    tally = fuzz(plan, FindingStore(tmp_path)).tally
    assert tally.durations.keys() == {"ddp", "tensor_program"}
    assert tally.programs.num_programs > 20
    assert tally.reach.num_scenarios > 20


def test_controls_go_with_the_kinds_of_a_plan() -> None:
    """Mutants for trainings, faults for programs, one of either where there are both."""
    mixed = replace(PLAN, strategy=fakes.some_scenarios, controls=applicable_faults)
    kinds = {type(fault) for fault in applicable_faults(mixed)}
    assert kinds == {Mutant, ProgramFault}
    assert {type(fault) for fault in applicable_faults(replace(mixed, strategy=None))} == {ProgramFault}
    assert {type(fault) for fault in applicable_faults(replace(mixed, programs=None))} == {Mutant}
    assert choose_control(mixed) is not None


@pytest.mark.slow
def test_every_fault_is_caught_in_few_programs() -> None:
    """In those that campaigns draw; how many it took is what a campaign tells of its control."""
    from equivcheck.campaign.plan import generated_programs

    plan = replace(PLAN, programs=generated_programs, check=check_case)
    took = {}
    for number, fault in enumerate(program_faults(plan)):
        control = choose_control(replace(plan, seed=number))
        assert control is not None
        while not control.is_over:
            control.draw()
            control.step(lambda case, alter: check_case(case, world="sim", deadline=10.0, alter=alter))
        assert control.result.caught, fault
        took[control.result.name] = control.result.examples
    assert max(took.values()) <= 200, took


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_program_that_is_checked_again_has_more_time(world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline of programs that is below that of the plan grows with it, so that what is slow is not taken for a hang."""
    program = TensorProgram(mesh=(2,), statements=(Leaf(shape=(2,), placements=("R",)),))
    deadlines: list[float] = []
    monkeypatch.setattr(cases, "check", lambda _case, *, deadline, **_options: deadlines.append(deadline))
    for deadline in (1.0, PLAN.deadline, PLAN.with_more_time().deadline):
        check_case(program, world=world, deadline=deadline)
    assert deadlines == [1.0, PROGRAM_SECONDS, 2 * PROGRAM_SECONDS]
