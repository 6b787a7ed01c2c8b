"""All known DTensor errors in tensor programs."""

from __future__ import annotations

import tomllib
from importlib.resources import files

from cattrs import Converter

from equivcheck.oracle.verdict.verdict import Judgement
from equivcheck.programs.nouns.program import TensorProgram
from equivcheck.programs.run.known.difference import KnownDifference


def _read(text: str) -> tuple[KnownDifference, ...]:
    """Read entries from a file such as known.toml, and replace list names by their operations."""
    table, converter = tomllib.loads(text), Converter(forbid_extra_keys=True)
    lists = table["lists"]
    for each in table["difference"]:
        for field in ("operations", "sources"):
            each[field] = [name for listed in each.get(field, ()) for name in lists.get(listed, (listed,))]
    return tuple(converter.structure(each, KnownDifference) for each in table["difference"])


ON_FILE = _read(files("equivcheck.programs.run.known").joinpath("known.toml").read_text("utf-8"))
"""Known differences: silent differences, then errors, then differences possible in many programs.
The first match explains a finding."""


def known_difference(program: TensorProgram, verdict: Judgement) -> KnownDifference | None:
    """Return the known DTensor error that explains a finding; None if no known error does."""
    if not verdict.outcome.is_finding:
        return None
    return next((each for each in ON_FILE if each.explains(program, verdict)), None)
