"""Mutant registry: names, layouts and entry points."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from equivcheck.errors import UsageError
from equivcheck.layouts.composition.registry import layout_names
from equivcheck.mutants import registry
from equivcheck.mutants.mutant import Family, Minimum, Mutant
from equivcheck.mutants.registry import BrokenMutant, mutant, mutants, mutants_of
from equivcheck.mutants.sharding.optimizer_state import state_lost
from equivcheck.oracle.verdict.cause import Cause


def _nothing(_setup: object) -> None:
    """Plant nothing."""


FOREIGN = Mutant(
    name="a_third_party_s_own",
    wrong="Something of theirs.",
    family=Family.RUNTIME,
    layouts=("ddp", "fsdp2"),
    plant=_nothing,
    causes=(Cause.SUMMED,),
    minimum=Minimum(because="it takes two ranks"),
)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    mutants.cache_clear()
    yield
    mutants.cache_clear()


def _install(monkeypatch: pytest.MonkeyPatch, *loaded: object) -> None:
    points = [
        EntryPoint(name=f"entry{index}", value="third_party:MUTANT", group=registry.ENTRY_POINTS) for index in range(len(loaded))
    ]
    by_name = {point.name: value for point, value in zip(points, loaded, strict=True)}
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    monkeypatch.setattr(EntryPoint, "load", lambda point: by_name[point.name])


def test_every_module_of_faults_is_listed_family_by_family() -> None:
    """An unlisted module would never register its mutants. A family is a folder or a module."""
    root = Path(registry.__file__).parent
    modules = {
        path.relative_to(root).with_suffix("").as_posix().replace("/", ".")
        for path in root.rglob("*.py")
        if re.search(r"^@(fault|_settings)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert sorted(registry._MODULES) == sorted(modules)
    assert list(dict.fromkeys(name.split(".")[0] for name in registry._MODULES)) == [family.value for family in Family]


def test_a_built_in_mutant_is_the_function_that_plants_it() -> None:
    """Name, text and family come from the function's name, docstring and module."""
    assert all(name == found.name for name, found in mutants().items())
    found = mutant("state_lost")
    assert found.plant is state_lost
    assert found.wrong == "Optimizer state is cleared before each step."
    assert found.family is Family.SHARDING


def test_every_built_in_mutant_names_layouts_that_exist() -> None:
    """A scenario can be generated for each mutant."""
    assert {name for found in mutants().values() for name in found.layouts} <= set(layout_names())


def test_an_entry_point_adds_a_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third-party mutant is found by name and by layout."""
    _install(monkeypatch, FOREIGN)
    assert mutant(FOREIGN.name) is FOREIGN
    assert FOREIGN in mutants_of(("fsdp2",))
    assert FOREIGN not in mutants_of(("pipeline",))


def test_an_unknown_name_lists_those_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the unknown mutant and lists all others."""
    _install(monkeypatch, FOREIGN)
    with pytest.raises(UsageError, match=r"^mutant 'typo' is not valid: .*a_third_party_s_own$"):
        mutant("typo")


def test_an_unknown_layout_lists_those_that_exist() -> None:
    """The error names the unknown layout and lists all others."""
    with pytest.raises(UsageError, match=r"^layout 'typo' .*Expected one of ddp, "):
        mutants_of(("ddp", "typo"))


@pytest.mark.parametrize(
    ("loaded", "says"),
    [
        ((_nothing,), r"Expected a Mutant$"),
        ((FOREIGN, FOREIGN), r"name 'a_third_party_s_own' is not valid: it is taken\. Expected a unique name$"),
        ((replace(FOREIGN, layouts=("ddp", "typo")),), r"layout 'typo' .*Expected one of ddp, "),
    ],
)
def test_an_entry_point_that_gives_no_new_mutant_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, loaded: tuple[object, ...], says: str
) -> None:
    """The error names the entry point and what it loaded."""
    _install(monkeypatch, *loaded)
    with pytest.raises(BrokenMutant, match=rf"^entry point 'entry\d' of equivcheck\.mutants \(third_party:MUTANT\): .*{says}"):
        mutants()


def test_an_entry_point_that_cannot_be_imported_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the entry point and the import error in one line."""
    point = EntryPoint(name="theirs", value="no_such_module:MUTANT", group=registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: (point,))
    with pytest.raises(BrokenMutant, match=r"^entry point 'theirs' .*ModuleNotFoundError: No module named 'no_such_module'$"):
        mutants()
