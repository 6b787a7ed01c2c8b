"""Study behind a docs page: errors that a type checker finds, compared with errors that runs show."""

from __future__ import annotations

from importlib.metadata import version

import pytest

pytest.importorskip("spmd_types", reason="spmd_types is not a dependency")

from typed import page
from typed.judges import judged
from typed.page import CASES, Case
from typed.program import Program, wrong

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.skipif(
        version("spmd_types") != page.measured_version(), reason="the docs describe another version of spmd_types"
    ),
]


@pytest.mark.slow  # nightly: the study judges spmd_types, and tests/unit and tests/equivalence cover our own code
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name.replace(" ", "_")) for case in CASES])
def test_both_judges_agree_with_the_docs(case: Case) -> None:
    """If the docs name no cause, none is searched, because that takes most of the time."""
    said = page.measured()[case.name]
    assert judged(case.program, case.change, explain=bool(said.cause)) == said


def test_right_programs_are_equivalent_and_well_typed() -> None:
    """The type checker accepts all unchanged programs, and runs accept all correct ones."""
    found = page.measured()
    assert not [case.name for case in CASES if case.change is None and found[case.name].types]
    assert not [case.name for case in CASES if not case.is_wrong and found[case.name].outcome != "EQUIVALENT"]
    assert not [case.name for case in CASES if case.is_wrong and found[case.name].outcome not in ("DIVERGED", "EQUIVALENT")]


def test_there_are_enough_programs() -> None:
    """Wrong and correct changes, each with a unique name."""
    assert len({case.name for case in CASES}) == len(CASES) == len(page.measured())
    assert sum(case.is_wrong for case in CASES) >= 40
    assert sum(case.change is not None and not case.is_wrong for case in CASES) >= 5


def test_a_change_that_changes_nothing_is_refused() -> None:
    """Otherwise a correct program would count as a wrong one."""
    program: Program = page.PROGRAMS[0]
    with pytest.raises(ValueError, match=r"'spmd\.scan' is not in"):
        program.changed(wrong("no such call", ("spmd.scan", "spmd.all_gather")))


def test_the_docs_have_the_tables() -> None:
    """The end of the page is written from the measured results."""
    assert page.PAGE.read_text("utf-8").endswith(f"\n{page.tail()}"), "PYTHONPATH=tests python -m typed.page writes it"
