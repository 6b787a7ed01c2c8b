"""Files in a finding's folder: scenario.json, verdict.json, environment.json and a README.md for people."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from equivcheck.campaign.findings.environment import Environment, environment
from equivcheck.campaign.findings.fingerprint import fingerprint
from equivcheck.campaign.findings.readme import readme
from equivcheck.campaign.findings.versions import ShownIn
from equivcheck.checking.kinds import VERDICTS, num_steps
from equivcheck.errors import EquivCheckError, InvalidScenario, UsageError
from equivcheck.layouts.base.expected_calls.communication import to_traffic, totals
from equivcheck.layouts.composition.expected_calls import predict_calls
from equivcheck.oracle.verdict.description import failure_line
from equivcheck.oracle.verdict.verdict import CaseVerdict, Verdict
from equivcheck.programs.nouns import case_from_json
from equivcheck.scenario.file_format.codec import decode, encode, load, to_json
from equivcheck.scenario.noun import short_repr
from equivcheck.system.files import UnreadableFile, read_text, replace_text
from equivcheck.worlds.pool import LOCAL_WORLDS

SCENARIO, VERDICT, ENVIRONMENT, README = "scenario.json", "verdict.json", "environment.json", "README.md"
VERSIONS = "versions.json"
"""File with a bisection's result. It is missing if the finding was not bisected."""


class BrokenFinding(UsageError):
    """A folder does not contain a valid finding. The text names the file and the mistake."""


class StoreFailed(EquivCheckError):
    """A finding cannot be written. Earlier findings are not affected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A finding, loaded from its folder."""

    path: Path
    """The finding's folder."""
    verdict: CaseVerdict
    """Verdict on the finding's case, with this case."""
    environment: Environment
    """Package versions and machine with which the finding was made."""
    shown_in: ShownIn | None = None
    """Torch versions that show the finding; None if they were not searched by bisection."""

    @property
    def fingerprint(self) -> str:
        """Hash in 12 hex digits, equal for verdicts with the same fault."""
        return fingerprint(self.verdict)


def verdict_object(verdict: CaseVerdict) -> dict[str, Any]:
    """Convert a verdict to JSON values. The ranks' collective calls are left out.

    The verdict's case is stored with its kind and format version, as in a scenario file.
    """
    mark, (_, field) = fingerprint(verdict) if verdict.outcome.is_finding else None, VERDICTS[type(verdict.case)]
    return {"fingerprint": mark, **_values(verdict), field: json.loads(to_json(verdict.case))}


def verdict_from(values: dict[str, Any], case: Any, *, where: str) -> CaseVerdict:
    """Build a verdict from JSON values and its case.

    `where` names the file in errors. Raises `InvalidScenario` if a value is not valid.
    """
    verdict, field = VERDICTS[type(case)]
    return decode(verdict, values | {field: encode(case)}, where=where)


def communication_object(verdict: Verdict) -> dict[str, Any]:
    """Return each rank's collective calls, and the expected ones, as JSON values."""
    training, layout = verdict.scenario.training, verdict.scenario.layout
    counted = [totals(calls, layout.mesh) for calls in verdict.calls]
    expected = [to_traffic(predict_calls(training, layout, rank).with_bytes_from(actual)) for rank, actual in enumerate(counted)]
    return {
        "unmodelled": verdict.unmodelled,
        "calls": encode(verdict.calls),
        "expected": None if verdict.unmodelled else [[encode(traffic) for traffic in rank] for rank in expected],
    }


def _values(verdict: CaseVerdict) -> dict[str, Any]:
    # The ranks' calls are large, and another run can record them.
    values: dict[str, Any] = encode(replace(verdict, calls=()) if isinstance(verdict, Verdict) else verdict)
    for name in ("calls", "signature"):
        values.pop(name, None)
    return values


def write_finding(folder: Path, verdict: CaseVerdict, shown_in: ShownIn | None = None) -> None:
    """Write the files of a finding to an existing folder: case, verdict, versions and README.md."""
    found_in = environment()
    values = _values(verdict)
    del values[VERDICTS[type(verdict.case)][1]]
    texts = {
        SCENARIO: to_json(verdict.case),
        VERDICT: json.dumps(values, indent=2, allow_nan=False),
        ENVIRONMENT: json.dumps(encode(found_in), indent=2),
        README: _readme(fingerprint(verdict), verdict, found_in, shown_in),
    }
    for name, text in texts.items():
        _write(folder / name, text)
    if shown_in is not None:
        _write(folder / VERSIONS, json.dumps(encode(shown_in), indent=2))


def write_versions(finding: Finding, shown_in: ShownIn) -> None:
    """Add a bisection result to a finding's folder.

    Raises `BrokenFinding` if the case in the folder was replaced meanwhile, and `StoreFailed` if the file cannot be written.
    """
    if load_finding(finding.path).verdict.case != finding.verdict.case:
        raise BrokenFinding(
            f"the case in {finding.path} changed during the bisection, so the result is not written. Bisect the finding again"
        )
    try:
        _write(finding.path / VERSIONS, json.dumps(encode(shown_in), indent=2))
        _write(finding.path / README, _readme(finding.fingerprint, finding.verdict, finding.environment, shown_in))
    except OSError as error:
        raise StoreFailed(f"the bisection result cannot be written to {finding.path}: {error.strerror or error}") from error


def _readme(mark: str, verdict: CaseVerdict, found_in: Environment, shown_in: ShownIn | None) -> str:
    # Only people read this text, so an error in it must not cost the finding.
    try:
        return readme(mark, verdict, found_in, shown_in)
    except Exception as error:
        return f"# {mark}: {verdict.outcome.value}\n\n{failure_line('this text', error)}\n\nSee {SCENARIO} and {VERDICT}."


def _write(path: Path, text: str) -> None:
    replace_text(path, text.rstrip("\n") + "\n")


def load_finding(folder: Path) -> Finding:
    """Read the finding in a folder. Raises `BrokenFinding` if a file is missing or not valid."""
    if not os.path.isdir(folder):
        raise BrokenFinding(f"finding {folder} is not valid: no such folder. Expected a folder with {SCENARIO} and {VERDICT}")
    try:
        case = case_from_json(_read(folder / SCENARIO), where=str(folder / SCENARIO))
        verdict = verdict_from(_upgraded(_object(folder / VERDICT)), case, where=str(folder / VERDICT))
        require_sound_verdict(verdict, str(folder / VERDICT))
        found_in = decode(Environment, _object(folder / ENVIRONMENT), where=str(folder / ENVIRONMENT))
        require_sound_environment(found_in, str(folder / ENVIRONMENT))
        shown_in = _shown_in(folder / VERSIONS)
    except InvalidScenario as error:
        raise BrokenFinding(f"broken finding: {error}") from error
    return Finding(path=folder, verdict=verdict, environment=found_in, shown_in=shown_in)


def _shown_in(path: Path) -> ShownIn | None:
    if not os.path.lexists(path):
        return None
    shown_in = decode(ShownIn, _object(path), where=str(path))
    require_sound_versions(shown_in, str(path))
    return shown_in


def _upgraded(values: dict[str, Any]) -> dict[str, Any]:
    """Rename fields and tensors in verdicts from older versions."""
    old_names = {"unforeseen": "unmodelled"}
    text = json.dumps({old_names.get(name, name): value for name, value in values.items()})
    upgraded: dict[str, Any] = json.loads(text.replace(".side.weight", ".auxiliary.weight"))
    return upgraded


def _object(path: Path) -> dict[str, Any]:
    values = load(_read(path), where=str(path))
    if not isinstance(values, dict):
        raise BrokenFinding(f"broken finding: {path} is not valid: it contains a {type(values).__name__}. Expected a JSON object")
    return values


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except UnreadableFile as error:
        raise BrokenFinding(f"broken finding: {error}") from error


_MAX_REASON = 100_000
"""Maximum characters in a reason. Torch errors with stacks from several ranks have some thousand."""
_MAX_VERSION = 200
"""Maximum characters in an environment field."""


def require_sound_verdict(verdict: CaseVerdict, where: str) -> None:
    """Raise `InvalidScenario` if a stored verdict is no valid finding, for example because its outcome is EQUIVALENT."""
    for wrong in _mistakes(verdict):
        raise InvalidScenario(f"{where}: {wrong}")


def _mistakes(verdict: CaseVerdict) -> Iterator[str]:
    if not verdict.outcome.is_finding or verdict.known:
        yield f"outcome {verdict.outcome.value} is not valid: it is not a finding. Expected diverged, crashed or hung"
    if verdict.world not in LOCAL_WORLDS:
        yield f"world {short_repr(verdict.world)} is not valid: unknown. Expected one of {', '.join(LOCAL_WORLDS)}"
    if len(verdict.reason) > _MAX_REASON:
        yield f"reason is not valid: {len(verdict.reason):,} characters. Expected at most {_MAX_REASON:,}"
    for follower in verdict.followers:
        if len(follower.split(" ", 3)) != 4:
            yield f"followers {short_repr(follower)} is not valid. Expected a text such as 'step 0 gradient NAME'"
    steps, divergence = num_steps(verdict.case), verdict.divergence
    if divergence is not None and divergence.step not in range(steps):
        yield f"divergence.step {short_repr(divergence.step)} is not valid: no such step. Expected 0 to {steps - 1}"


def require_sound_environment(environment: Environment, where: str) -> None:
    """Raise `InvalidScenario` if stored package versions cannot be printed or compared."""
    for field in fields(Environment):
        value = getattr(environment, field.name)
        if not (value.isprintable() and len(value) <= _MAX_VERSION):
            expected = f"at most {_MAX_VERSION} printable characters"
            raise InvalidScenario(f"{where}: {field.name} {short_repr(value)} is not valid. Expected {expected}")
    _require_version(environment.torch, f"{where}: torch")


def require_sound_versions(shown_in: ShownIn, where: str) -> None:
    """Raise `InvalidScenario` if a stored bisection result measured no version, or contains an invalid version number."""
    if not shown_in.versions or not shown_in.measured:
        raise InvalidScenario(f"{where}: versions are not valid: the bisection tested no torch version. Expected at least one")
    for version in (*shown_in.versions, *(found.torch for found in shown_in.measured)):
        _require_version(version, f"{where}: version")


def _require_version(text: str, where: str) -> None:
    try:
        Version(text)
    except InvalidVersion:
        raise InvalidScenario(
            f"{where} {short_repr(text)} is not valid: it is not a version number. Expected a torch version such as 2.13.0"
        ) from None
