"""The control: what a campaign must find, so that what it does not find means something."""

from __future__ import annotations

from dataclasses import replace

import pytest

from equivcheck.campaign import control
from equivcheck.campaign.control import MAX_DRAWN, applicable_mutants, choose_control
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.plan import Plan
from equivcheck.campaign.supervisor import fuzz
from equivcheck.mutants.mutant import Family
from unit.campaign import fakes

pytestmark = pytest.mark.usefixtures("workers_are_forked")

PLAN = Plan(num_checks=20, seed=0, strategy=fakes.some_scenarios, check=fakes.fine, controls=fakes.some_mutants)


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> FindingStore:
    """An empty store."""
    return FindingStore(tmp_path_factory.mktemp("findings"))


def test_a_control_is_caught_beside_the_ordinary_work(store: FindingStore) -> None:
    """The seed names the mutant; its examples are no checks of the campaign, and nothing of it is kept."""
    for seed, name in ((0, "doubled"), (1, "doubled_too")):
        summary = fuzz(replace(PLAN, seed=seed, num_workers=2), store)
        assert summary.control is not None
        assert (summary.control.name, summary.control.caught, summary.control.examples) == (name, True, 1)
        assert not summary.has_survivor
        assert summary.findings == ()
        assert summary.tally.num_checks == 20


def test_a_blind_check_is_found_out(store: FindingStore) -> None:
    """A check that finds nothing wrong on purpose within the bound has a survivor."""
    summary = fuzz(replace(PLAN, check=fakes.blind), store)
    assert summary.control is not None
    assert not summary.control.caught
    assert 10 < summary.control.examples <= MAX_DRAWN
    assert summary.has_survivor


@pytest.mark.parametrize(
    ("plan", "name", "passed_over"),
    [(replace(PLAN, seconds=1.0, num_checks=None), "doubled_too", ("doubled",)), (PLAN, "doubled", ())],
    ids=["by its time", "by its checks"],
)
def test_a_fault_that_takes_too_long_to_show_gives_way_to_the_next(
    plan: Plan, name: str, passed_over: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a campaign that ends by its time. One that ends by its checks draws the same, however fast the machine is."""
    monkeypatch.setattr(control, "_LEAST_PATIENCE", 0.0)
    monkeypatch.setattr(control, "_PATIENCE_SHARE", 0.0)
    found = choose_control(plan)
    assert found is not None
    found.step(lambda case, _fault: fakes.blind(case, world="sim", deadline=1.0))
    assert (found.result.name, found.result.passed_over) == (name, passed_over)


@pytest.mark.slow
def test_a_control_that_is_never_reached_is_no_control(store: FindingStore) -> None:
    """What cannot be planted in any scenario that is drawn proves nothing either."""
    summary = fuzz(replace(PLAN, controls=fakes.unreachable_mutants), store)
    assert summary.control is not None
    assert summary.control.examples == 0
    assert summary.has_survivor


def test_without_mutants_there_is_no_control(store: FindingStore) -> None:
    """A plan that names none runs without."""
    summary = fuzz(replace(PLAN, controls=None), store)
    assert summary.control is None
    assert not summary.has_survivor


def test_controls_go_with_the_layouts_of_a_plan() -> None:
    """Only what can be planted there is drawn, with as many ranks as there may be; where a hang takes long, none that hang."""
    plan = replace(PLAN, layouts=("fsdp2",), max_ranks=2)
    chosen = applicable_mutants(plan)
    assert chosen
    assert all("fsdp2" in mutant.layouts and mutant.minimum.ranks <= 2 for mutant in chosen)
    assert Family.RUNTIME in {mutant.family for mutant in applicable_mutants(PLAN)}
    assert Family.RUNTIME not in {mutant.family for mutant in applicable_mutants(replace(PLAN, world="gloo"))}
    assert choose_control(replace(plan, controls=applicable_mutants)) is not None
