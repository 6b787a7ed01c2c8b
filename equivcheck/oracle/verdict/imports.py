"""Import lines for a case that is printed as code."""

from __future__ import annotations

import ast
import enum
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any


def import_lines(case: Any, code: str, width: int) -> list[str]:
    """Return import lines for all classes in `case` that `code` names, sorted by module.

    Lines are wrapped to `width` characters. Returns no lines if `code` cannot be parsed.
    """
    try:
        named = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    except SyntaxError:  # a third party's repr
        return []
    names: dict[str, set[str]] = defaultdict(set)
    for kind in _classes(case):
        if kind.__name__ in named:
            names[_public_module(kind)].add(kind.__name__)
    return [line for module in sorted(names) for line in _lines(module, sorted(names[module]), width)]


def _classes(value: Any) -> Iterator[type]:
    """Yield the classes of all dataclasses and enums in a value."""
    if isinstance(value, enum.Enum) or is_dataclass(value):
        yield type(value)
    parts = [getattr(value, field.name) for field in fields(value)] if is_dataclass(value) else value
    if is_dataclass(value) or isinstance(value, (tuple, list)):
        for part in parts:
            yield from _classes(part)


def _public_module(kind: type) -> str:
    """The outermost package that exports the class.

    The package `equivcheck` itself exports only a few classes, so it does not count.
    """
    parts = kind.__module__.split(".")
    packages = (".".join(parts[:length]) for length in range(1, len(parts)))
    exporting = (name for name in packages if name != "equivcheck" and vars(sys.modules[name]).get(kind.__name__) is kind)
    return next(exporting, kind.__module__)


def _lines(module: str, names: list[str], width: int) -> list[str]:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= width:
        return [line]
    indented = textwrap.wrap(", ".join(names) + ",", width, initial_indent="    ", subsequent_indent="    ")
    return [f"from {module} import (", *indented, ")"]
