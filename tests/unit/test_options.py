"""Every field of a scenario is applied, exported, drawn and predicted, or says that it need not be."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import Field, fields
from functools import cache
from pathlib import Path

import pytest

import equivcheck
from equivcheck.campaign.coverage.features import _fields
from equivcheck.scenario import Data, Execution, Layer, Layout, Mesh, Model, Parallelism, Training
from equivcheck.scenario.parallelisms import PARALLELISMS

PACKAGE = Path(equivcheck.__file__).parent
FOLDERS = PACKAGE / "layouts/parallelisms"
OPTIONS = [pytest.param(kind, field, id=f"{kind.__name__}.{field.name}") for kind in PARALLELISMS for field in fields(kind)]
NOUNS = [(kind, field.name) for kind in (Training, Model, Layer, Data, Execution) for field in fields(kind)]


@cache
def names_in(*paths: Path) -> frozenset[str]:
    """Attributes, called functions, keywords and strings in some files, and in all files below some folders."""
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else (path,))]
    return frozenset(name for file in files for name in _names(ast.walk(ast.parse(file.read_text(encoding="utf-8")))))


def _names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


JOBS = ("limits", "communication", "export", "known")
"""Modules in a parallelism's folder with another job than applying it."""


def with_facts(kind: type[Parallelism], *paths: Path) -> tuple[Path, ...]:
    """Some files, and the files without torch from which they import facts: in the same folder, on plans and on positions."""
    texts = "".join(path.read_text(encoding="utf-8") for path in paths if path.is_file())
    base, own = PACKAGE / "layouts/base", (path for path in (FOLDERS / kind.tag).glob("*.py") if path.stem not in JOBS)
    facts = (path for path in (*own, base / "positions.py") if f".{path.parent.name}.{path.stem} import" in texts)
    return (*paths, *facts, *((base / "plan").glob("*.py") if ".base.plan." in texts else ()))


def limits_of(kind: type[Parallelism]) -> tuple[Path, ...]:
    """Files with the limits of one parallelism, and of all."""
    general = (PACKAGE / "layouts/base/limits", *(PACKAGE / "layouts/composition").glob("*limits.py"))
    return with_facts(kind, FOLDERS / kind.tag / "limits.py", *general)


@pytest.mark.parametrize(("kind", "option"), OPTIONS)
def test_an_option_is_applied_written_and_drawn(kind: type[Parallelism], option: Field[object]) -> None:
    """The kind reads each option, the export reads or refuses it, and a strategy draws it."""
    folder = FOLDERS / kind.tag
    own = sorted(path for path in folder.glob("*.py") if path.stem not in JOBS)
    assert option.name in names_in(*with_facts(kind, *own))
    assert option.name in names_in(*with_facts(kind, *sorted(folder.glob("export*.py"))))
    assert option.name in names_in(PACKAGE / "strategies")


@pytest.mark.parametrize(("kind", "option"), OPTIONS)
def test_an_option_has_limits_unless_its_field_denies_it(kind: type[Parallelism], option: Field[object]) -> None:
    """An option occurs in the limits, or its field says that no limit depends on it."""
    assert (option.name in names_in(*limits_of(kind))) is option.metadata.get("limits", True)


@pytest.mark.parametrize(("kind", "option"), OPTIONS)
def test_expected_calls_depend_on_an_option_unless_its_field_denies_it(kind: type[Parallelism], option: Field[object]) -> None:
    """The communication model reads an option, itself or by a method, or the option's field says that no call depends on it."""
    own = FOLDERS / kind.tag / "communication.py"
    imported = (
        path for path in FOLDERS.glob("*/communication.py") if f".{path.parent.name}.{path.stem} import" in own.read_text()
    )
    read = names_in(*with_facts(kind, own, *imported))
    names = {option.name} | _told_of(kind, option.name)
    assert bool(names & read) is option.metadata.get("calls", True)


@pytest.mark.parametrize(("kind", "name"), NOUNS)
def test_a_field_of_a_training_is_trained_written_and_drawn(kind: type, name: str) -> None:
    """Training, export and strategies read each field, itself or by a method."""
    told = {name} | _told_of(kind, name)
    assert told & names_in(PACKAGE / "training", PACKAGE / "layouts/base/execution", PACKAGE / "layouts/composition", FOLDERS)
    assert told & names_in(PACKAGE / "export", PACKAGE / "layouts/base/script", FOLDERS)
    assert name in names_in(PACKAGE / "strategies")


def _told_of(kind: type, name: str) -> frozenset[str]:
    """Public methods and properties that read a field."""
    (noun,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(noun, ast.ClassDef)
    methods = [each for each in noun.body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")]
    return frozenset(each.name for each in methods if f"self.{name}" in map(ast.unparse, ast.walk(each)))


@pytest.mark.parametrize("kind", [Training, Model, Layer, Data, Layout, Mesh, Execution, *PARALLELISMS])
def test_every_field_is_a_feature(kind: type) -> None:
    """Coverage counts each field except seeds."""
    assert [field.name for field in _fields(kind)] == [field.name for field in fields(kind) if not field.name.endswith("seed")]
