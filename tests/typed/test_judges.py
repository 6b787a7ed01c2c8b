"""What a type checker and what runs see of the same programs: the docs say it, and this is what they say it of."""

from __future__ import annotations

from importlib.metadata import version

import pytest

pytest.importorskip("spmd_types", reason="no dependency: users bring it")

from typed import page
from typed.judges import judged
from typed.page import CASES, Case
from typed.program import Program, wrong

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.skipif(
        version("spmd_types") != page.measured_version(), reason="the docs are about another version of spmd_types"
    ),
]


def is_quick(case: Case) -> bool:
    """Each program, and its first change, is asked about in each run: the others take no longer, but are many."""
    return case.change is None or case.change is case.program.changes[0]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if is_quick(case) else pytest.mark.slow, id=case.name.replace(" ", "_")) for case in CASES],
)
def test_judges_say_what_the_docs_say(case: Case) -> None:
    """Of each program, both. Where no cause was known, none is looked for, which takes most of the time."""
    said = page.measured()[case.name]
    assert judged(case.program, case.change, explain=bool(said.cause)) == said


def test_right_programs_are_equivalent_and_well_typed() -> None:
    """As they are; and runs refuse none that a change leaves right."""
    found = page.measured()
    assert not [case.name for case in CASES if case.change is None and found[case.name].types]
    assert not [case.name for case in CASES if not case.is_wrong and found[case.name].outcome != "EQUIVALENT"]
    assert not [case.name for case in CASES if case.is_wrong and found[case.name].outcome not in ("DIVERGED", "EQUIVALENT")]


def test_there_are_enough_programs() -> None:
    """Of both kinds, each by a name of its own."""
    assert len({case.name for case in CASES}) == len(CASES) == len(page.measured())
    assert sum(case.is_wrong for case in CASES) >= 40
    assert sum(case.change is not None and not case.is_wrong for case in CASES) >= 5


def test_a_change_that_changes_nothing_is_refused() -> None:
    """Else a right program would stand for a wrong one."""
    program: Program = page.PROGRAMS[0]
    with pytest.raises(ValueError, match=r"'spmd\.scan' is not in"):
        program.changed(wrong("no such call", ("spmd.scan", "spmd.all_gather")))


def test_the_docs_have_the_tables() -> None:
    """The end of the page is written from what was measured."""
    assert page.PAGE.read_text("utf-8").endswith(f"\n{page.tail()}"), "PYTHONPATH=tests python -m typed.page writes it"
