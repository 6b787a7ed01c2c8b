"""The skill file for coding agents names commands that exist."""

from __future__ import annotations

import re

import equivcheck
from equivcheck import Outcome
from examples.pages import ROOT, examples, parse

SKILL = ROOT / "skills" / "equivcheck" / "SKILL.md"


def test_commands_parse() -> None:
    """Each line in its shell block is a command line."""
    lines = [line for example in examples(SKILL) if example.language == "sh" for line in example.text.splitlines()]
    assert lines
    for line in lines:
        parse(line)


def test_names_exist() -> None:
    """Functions are public, and its outcomes are all that a training of yours can have."""
    text = SKILL.read_text("utf-8")
    functions = set(re.findall(r"`(check_\w+)`", text))
    assert functions
    assert functions <= set(equivcheck.__all__)
    outcomes = [name for cell in re.findall(r"^\| ([A-Z, ]+) \|", text, re.MULTILINE) for name in cell.split(", ")]
    assert outcomes
    assert set(outcomes) <= {outcome.name for outcome in Outcome}
