"""Tensor programs as JSON, with a kind and a format version."""

from __future__ import annotations

from equivcheck.errors import InvalidScenario
from equivcheck.programs.nouns.program import TensorProgram
from equivcheck.scenario.file_format.codec import CASE, decode, dump, encode, from_json, load, to_json
from equivcheck.scenario.file_format.converter import KIND
from equivcheck.scenario.file_format.misfit import quote
from equivcheck.scenario.scenario import Scenario

FORMAT = 1
"""The only supported format version."""


@to_json.register
def program_to_json(program: TensorProgram) -> str:
    """Write a tensor program as one JSON line with every field."""
    return dump({"format": FORMAT, **encode(program)})


def program_from_json(text: str, *, where: str = "program") -> TensorProgram:
    """Read a tensor program from JSON. Fields with a default may be omitted.

    Error messages call the text `where`. Raises `InvalidScenario`, with the place of the error in one line.
    """
    data = load(text, where=where)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InvalidScenario(
            f"{where} is not valid: it is not a tensor program of format {FORMAT}. "
            f"Expected JSON that equivcheck wrote in format {FORMAT}"
        )
    return decode(TensorProgram, {name: value for name, value in data.items() if name != "format"}, where=where)


def case_from_json(text: str, *, where: str = "case") -> Scenario | TensorProgram:
    """Read a scenario or a tensor program from JSON. A field in the JSON names the kind. Raises `InvalidScenario`.

    Error messages call the text `where`.
    """
    data = load(text, where=where)
    kind = data.get(KIND, CASE) if isinstance(data, dict) else CASE
    if kind == TensorProgram.tag:
        return program_from_json(text, where=where)
    if kind != CASE:
        raise InvalidScenario(f"{where}: {KIND} {quote(kind)} is not valid. Expected {CASE} or {TensorProgram.tag}")
    return from_json(text, where=where)
