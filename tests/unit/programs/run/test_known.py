"""Known DTensor errors: entries, the programs that show them, and issue texts."""

from __future__ import annotations

import pytest
from packaging.version import Version

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs.check import check_program
from equivcheck.programs.nouns import Redistribution, RoundTrip
from equivcheck.programs.nouns.operations.registry import OPERATIONS
from equivcheck.programs.run.known.on_file import ON_FILE
from equivcheck.system.torch_version import installed_torch, is_torch_in
from unit.programs.smallest import SMALLEST_PROGRAMS

ENTRIES = {each.id: each for each in ON_FILE}
FOR_EVER = "dtensor_endless_view"
"""The error that needs a deadline to show."""
KILLS_RANKS = "dtensor_batch_norm_of_no_channels"
"""The error that ends the processes of ranks, which must not be this one."""
DECOMPOSED = "dtensor_attention_of_cut_features"
"""DTensor tries every decomposition of the operation: ten seconds."""


def test_every_entry_has_a_program_and_a_row_of_versions() -> None:
    """All its operations exist."""
    assert ENTRIES.keys() == SMALLEST_PROGRAMS.keys()
    assert len(ENTRIES) == len(ON_FILE)
    assert all(each.phases or each.raises for each in ON_FILE)
    assert {name for each in ON_FILE for name in (*each.operations, *each.sources)} <= {
        *OPERATIONS,
        Redistribution.tag,
        RoundTrip.tag,
    }


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == DECOMPOSED else ()) for name in ENTRIES if name != FOR_EVER],
)
def test_a_program_shows_its_entry_in_its_versions_and_in_no_other(name: str) -> None:
    """On the installed torch it is known if the version shows it, and otherwise right, refused, or another entry."""
    verdict = check_program(SMALLEST_PROGRAMS[name], world="gloo" if name == KILLS_RANKS else "sim")
    if is_torch_in(ENTRIES[name].torch):
        assert (verdict.outcome, verdict.known) == (Outcome.KNOWN, name), verdict.describe()
    else:
        here = installed_torch().release[:2]  # rows also hold for other patch releases
        shown = next((each for version, each in ENTRIES[name].shows.items() if Version(version).release[:2] == here), "")
        assert not verdict.known or ("otherwise" in shown and verdict.known != name), verdict.describe()
        assert not verdict.clones or shown == "refused"


@pytest.mark.slow
def test_what_never_ends_is_known() -> None:
    """The rank's stack at the deadline identifies it."""
    verdict = check_program(SMALLEST_PROGRAMS[FOR_EVER], deadline=3)
    assert (verdict.outcome, verdict.known) == (Outcome.KNOWN, FOR_EVER)


@pytest.mark.parametrize("name", ENTRIES)
def test_ranges_are_those_in_which_it_was_seen(name: str) -> None:
    """A tried version is in the range if, and only if, the program showed the error there."""
    from packaging.specifiers import SpecifierSet

    versions = SpecifierSet(ENTRIES[name].torch)
    assert [version for version in ENTRIES[name].seen_on() if version not in versions] == []
    assert [version for version in ENTRIES[name].unseen_on() if version in versions] == []
