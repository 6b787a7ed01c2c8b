"""A failing scenario as a folder: scenario.json, verdict.json, environment.json and a README.md for people."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cattrs.errors import BaseValidationError

from equivcheck.errors import InvalidScenario, UsageError
from equivcheck.findings.environment import Environment, environment
from equivcheck.findings.fingerprint import fingerprint
from equivcheck.findings.readme import readme
from equivcheck.findings.verdict_json import verdict_from_dict, verdict_to_dict
from equivcheck.oracle.verdict import Verdict
from equivcheck.scenario.codec import from_json, to_json

SCENARIO, VERDICT, ENVIRONMENT, README = "scenario.json", "verdict.json", "environment.json", "README.md"


class BrokenFinding(UsageError):
    """A folder is not a finding, or no longer is; the text names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a folder of the store holds."""

    path: Path
    """The folder."""
    verdict: Verdict
    """What was found, with the scenario."""
    environment: Environment
    """Where it was found."""

    @property
    def fingerprint(self) -> str:
        """The same for equal faults."""
        return fingerprint(self.verdict)


def write_finding(folder: Path, verdict: Verdict) -> None:
    """Fill an existing folder with a finding."""
    found_in = environment()
    values = verdict_to_dict(verdict)
    del values["scenario"]
    texts = {
        SCENARIO: to_json(verdict.scenario),
        VERDICT: json.dumps(values, indent=2, allow_nan=False),
        ENVIRONMENT: json.dumps(asdict(found_in), indent=2),
        README: readme(fingerprint(verdict), verdict, found_in),
    }
    for name, text in texts.items():
        (folder / name).write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def load_finding(folder: Path) -> Finding:
    """Read a folder that `write_finding` filled; raises `BrokenFinding`."""
    if not folder.is_dir():
        raise BrokenFinding(f"finding {folder} does not exist; expected a folder with {SCENARIO} and {VERDICT}")
    scenario_text = _read(folder / SCENARIO)
    values = _read_object(folder / VERDICT)
    try:
        scenario = json.loads(to_json(from_json(scenario_text, where=str(folder / SCENARIO))))
    except InvalidScenario as error:
        raise BrokenFinding(str(error)) from error
    return Finding(path=folder, verdict=_verdict(folder, values | {"scenario": scenario}), environment=_environment(folder))


def _verdict(folder: Path, values: dict[str, Any]) -> Verdict:
    try:
        return verdict_from_dict(values)
    except (BaseValidationError, ValueError, TypeError, KeyError) as error:
        raise BrokenFinding(f"finding {folder}: {VERDICT} does not hold a verdict: {_first_line(error)}") from error


def _environment(folder: Path) -> Environment:
    try:
        return Environment(**_read_object(folder / ENVIRONMENT))
    except TypeError as error:
        raise BrokenFinding(f"finding {folder}: {ENVIRONMENT} does not hold an environment: {_first_line(error)}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BrokenFinding(f"finding {path.parent}: {path.name} cannot be read: {_first_line(error)}") from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise BrokenFinding(f"finding {path.parent}: {path.name} is not JSON: {_first_line(error)}") from error
    if not isinstance(values, dict):
        raise BrokenFinding(f"finding {path.parent}: {path.name} holds {type(values).__name__}; expected an object")
    return values


def _first_line(error: BaseException) -> str:
    """The innermost reason in one line: cattrs groups errors, one a field."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]
