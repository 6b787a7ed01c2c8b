"""Tensor programs as JSON, both ways, with a kind and a format version."""

from __future__ import annotations

from equivcheck.errors import InvalidScenario
from equivcheck.scenario.file_format.codec import decode, dump, encode, load
from equivcheck.tensor_program.program import TensorProgram

FORMAT = 1
"""The format that is written, and the only one that is read."""


def program_to_json(program: TensorProgram) -> str:
    """A program as one line of JSON with every field."""
    return dump({"format": FORMAT, **encode(program)})


def program_from_json(text: str, *, where: str = "program") -> TensorProgram:
    """The program that a JSON text describes; fields with a default may be left out.

    `where` is what error texts call the text. Raises `InvalidScenario`, one line, naming the place.
    """
    data = load(text, where=where)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InvalidScenario(f"{where}: no tensor program of format {FORMAT}; allowed: an object with that format")
    return decode(TensorProgram, {name: value for name, value in data.items() if name != "format"}, where=where)
