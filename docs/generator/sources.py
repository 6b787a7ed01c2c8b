"""Data for the generated pages. Only this module imports internals and tests."""

from __future__ import annotations

import ast
import pkgutil
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import equivcheck
import equivcheck.scenario
from equivcheck.cli import main
from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit
from equivcheck.layouts.composition.registry import layout_kinds
from equivcheck.mutants.registry import mutants
from equivcheck.oracle.known_issues.issue_script import issue_script
from equivcheck.oracle.known_issues.known import all_known_issues
from equivcheck.oracle.known_issues.showing import measured_results
from equivcheck.oracle.known_issues.workarounds import WORKAROUNDS
from equivcheck.programs.nouns import TensorProgram
from equivcheck.programs.run.known.on_file import ON_FILE
from equivcheck.scenario import Scenario

ROOT = Path(__file__).parents[2]

__all__ = [
    "ON_FILE",
    "WORKAROUNDS",
    "AnyLimit",
    "all_known_issues",
    "interventions",
    "issue_script",
    "limits_by_layout",
    "main",
    "measured_results",
    "mutants",
    "nouns",
    "private_uses",
    "smallest_programs",
    "smallest_scenarios",
]

AnyLimit = Limit | LayoutLimit

_OF_EXTRAS = (
    "equivcheck.campaign.cluster.on_ray",
    "equivcheck.layouts.parallelisms.local_tensor_parallel.typed_regions",
    "equivcheck.programs.run.plain.typed",
)
"""Modules that need an optional library."""


def limits_by_layout() -> dict[str, tuple[AnyLimit, ...]]:
    """Limits by parallelism tag. The empty tag has limits for all layouts and for combinations."""
    own = {tag: (*kind.layout_limits, *kind.model_limits, *kind.limits) for tag, kind in layout_kinds().items()}
    of_kinds = {limit.reason for limits in own.values() for limit in limits}
    return {"": tuple(limit for limit in _all_limits() if limit.reason not in of_kinds)} | own


@cache
def _all_limits() -> tuple[AnyLimit, ...]:
    """All limits in module variables, also in tuples, each once."""
    found = {id(limit): limit for module in _modules() for value in vars(module).values() for limit in _limits_in(value)}
    return tuple(found.values())


def _limits_in(value: object) -> Iterator[AnyLimit]:
    for each in value if isinstance(value, tuple) else (value,):
        if isinstance(each, AnyLimit):
            yield each


def _modules() -> Iterable[object]:
    names = [module.name for module in pkgutil.walk_packages(equivcheck.__path__, "equivcheck.")]
    return [import_module(name) for name in names if not name.endswith(("__main__", *_OF_EXTRAS))]


def nouns() -> dict[str, list[str]]:
    """Public scenario classes by topic: their module, or its folder for `base`. The class with the topic's name comes first."""
    found: dict[str, list[str]] = {}
    for name in equivcheck.scenario.__all__:
        home = getattr(equivcheck.scenario, name).__module__.removesuffix(".base")
        found.setdefault(home.rpartition(".")[2], []).append(name)
    return {topic: sorted(names, key=lambda name: name.lower() != topic) for topic, names in found.items()}


def interventions() -> list[dict[str, str]]:
    """Additions to the ranks' code: place, change, reason, and the torch problem behind it."""
    table = tomllib.loads(Path(__file__).with_name("interventions.toml").read_text("utf-8"))
    return [{"upstream": "by definition", **one} for one in table["intervention"]]


def smallest_programs() -> dict[str, TensorProgram]:
    """Smallest tensor program for each known difference, by its id."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.append(str(ROOT / "tests"))
    from unit.programs.smallest import SMALLEST_PROGRAMS

    return SMALLEST_PROGRAMS


def smallest_scenarios() -> dict[str, Scenario]:
    """Smallest scenario for each known issue that a scenario can show, by the issue's id."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.append(str(ROOT / "tests"))
    from unit.oracle.known.examples import SHOWN

    return {name: smallest for name, (smallest, _healthy) in SHOWN.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateUse:
    """A module that uses private torch API, as its source describes it."""

    module: str
    """Dotted name."""
    text: str
    """Docstring of the module, which gives the reason."""
    versions: str
    """Versions of torch with which it was tested, such as ``2.9 to 2.15``."""
    names: tuple[str, ...]
    """Private names of torch, sorted."""


_MARK = "private torch api"
"""Text, in any case, in the docstring of a module that uses private torch API; one named ``torch_private`` needs no mark."""
_VERSIONS = re.compile(r"(?:tested|tried) (?:with|on) torch ([\d., and to]*\d)", re.IGNORECASE)
_PRIVATE = re.compile(r"torch(\.\w+)*\._(?!_)\w+(\.\w+)*")


def private_uses() -> list[PrivateUse]:
    """Every module that uses private torch API, by name."""
    found = []
    for path in sorted((ROOT / "equivcheck").rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        text = " ".join((ast.get_docstring(tree) or "").split())
        if path.name == "torch_private.py" or _MARK in text.lower():
            versions, names = _VERSIONS.search(text), set(_private_names(tree))
            longest = sorted(name for name in names if not any(other.startswith(f"{name}.") for other in names))
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found.append(PrivateUse(module=module, text=text, versions=versions[1] if versions else "", names=tuple(longest)))
    return found


def _private_names(tree: ast.Module) -> Iterator[str]:
    """Imports, attributes and strings that name something private in torch. A local variable stands for its assigned value."""
    full: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            full |= {
                each.asname or each.name.partition(".")[0]: each.name if each.asname else "torch"
                for each in node.names
                if each.name.startswith("torch")
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            full |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    yield from (name for name in full.values() if _PRIVATE.fullmatch(name))
    for node in ast.walk(tree):  # breadth first, so an assignment in a module comes before uses in its functions
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and (name := _dotted(node.value, full)):
            full[target.id] = name
    for node in ast.walk(tree):
        name = _dotted(node, full)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
        if name and _PRIVATE.fullmatch(name):
            yield name


def _dotted(node: ast.AST | None, full: dict[str, str]) -> str:
    """Full name of an attribute of torch; empty for anything else."""
    if isinstance(node, ast.Name):
        return full.get(node.id, "")
    owner = _dotted(node.value, full) if isinstance(node, ast.Attribute) else ""
    return f"{owner}.{node.attr}" if owner else ""
