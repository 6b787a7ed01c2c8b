"""Torch version matrix: the doctor's probes, a corpus of scenarios, and the scripts for known issues."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import Version

import equivcheck
from equivcheck.errors import EquivCheckError
from equivcheck.oracle.known_issues.known import KnownIssue
from equivcheck.oracle.known_issues.showing import Showing, Shows, table_path
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.quality.doctor import Probe
from equivcheck.quality.versions.corpus import CorpusResult, check_corpus
from equivcheck.quality.versions.environments import Installation, run_python
from equivcheck.quality.versions.issues import run_scripts
from equivcheck.scenario import Scenario
from equivcheck.scenario.file_format.codec import decode, dump, encode
from equivcheck.system.files import read_text, replace_text

_DOCTOR_SECONDS = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionResult:
    """Results for one torch version."""

    torch: str
    """Installed version: ``2.13.0+cpu``."""
    probes: tuple[Probe, ...]
    """The doctor's results."""
    corpus: tuple[CorpusResult, ...]
    """One result per scenario in the corpus."""
    scripts: dict[str, Showing]
    """Script results by issue id."""

    def counts(self) -> Counter[Outcome]:
        """Count scenarios per outcome."""
        return Counter(result.outcome for result in self.corpus)

    def disagreements(self, issues: Iterable[KnownIssue]) -> dict[str, Showing]:
        """Return the results, by issue id, of all scripts that contradict their issue's version range.

        Such a script shows the issue on a torch version outside the range, or does not show it on a version inside.
        """
        return {
            issue.id: self.scripts[issue.id]
            for issue in issues
            if issue.id in self.scripts and not self.scripts[issue.id].agrees(is_in_range=issue.is_in(self.torch))
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Results for several torch versions, with the same code and scenarios."""

    code: str
    """Digest of equivcheck's code."""
    seed: int
    """Seed for the scenarios."""
    scenarios: tuple[Scenario, ...]
    """Scenarios in the corpus."""
    issues: tuple[str, ...]
    """Known issues with scripts in this matrix, by id."""
    versions: dict[str, VersionResult]
    """Results by version, oldest first."""

    def with_version(self, version: Version, found: VersionResult) -> Matrix:
        """Return the matrix with one more version's results."""
        versions = self.versions | {str(version): found}
        return replace(self, versions={name: versions[name] for name in sorted(versions, key=Version)})

    def is_bad(self, issues: Iterable[KnownIssue]) -> bool:
        """Whether any scenario ended in a finding, or any script's result contradicts the version range of its issue."""
        issues = tuple(issues)
        each = self.versions.values()
        return any(found.disagreements(issues) or any(one.outcome.is_finding for one in found.corpus) for found in each)

    def save(self, file: Path) -> None:
        """Write the results to a file atomically."""
        replace_text(file, dump(encode(self)) + "\n")


def load_or_new(file: Path, new: Matrix) -> Matrix:
    """Load results to continue with. Return `new` if the file is missing, or was written with other code, scenarios or issues."""
    try:
        found = decode(Matrix, json.loads(read_text(file)), where=str(file))
    except (ValueError, RecursionError, EquivCheckError):
        return new
    return found if replace(found, versions={}) == new else new


def measure_version(
    installation: Installation, scenarios: tuple[Scenario, ...], issues: Iterable[KnownIssue], tell: Callable[[str], None]
) -> VersionResult:
    """Run the doctor, check the scenarios, and run the issues' scripts on one version. `tell` receives progress lines."""
    name = f"torch {installation.version}"
    tell(f"{name}: doctor ...")
    probes = run_doctor(installation)
    tell(f"{name}: {sum(probe.works for probe in probes)} of {len(probes)} probes work; {len(scenarios)} scenarios ...")
    corpus = check_corpus(installation, scenarios)
    counts = Counter(result.outcome.value for result in corpus)
    tell(f"{name}: {', '.join(f'{count} {outcome}' for outcome, count in counts.most_common()) or 'no scenarios'}; scripts ...")
    scripts = run_scripts(installation, issues)
    tell(f"{name}: {sum(found.shows is Shows.SHOWS for found in scripts.values())} of {len(scripts)} scripts show their issue")
    return VersionResult(torch=installation.torch, probes=probes, corpus=corpus, scripts=scripts)


def run_doctor(installation: Installation) -> tuple[Probe, ...]:
    """Run `equivcheck doctor` with an installation's interpreter. If it fails, the result is one failed probe."""
    ran = run_python(installation.python, ("-m", "equivcheck", "doctor", "--json"), seconds=_DOCTOR_SECONDS)
    try:
        probes = json.loads(ran.printed)["probes"]
    except (ValueError, KeyError):
        why = "not done in time" if ran.code is None else ran.last_line
        return (Probe(world="sim", subject="doctor", works=False, reason=why, known="", seconds=0.0),)
    return decode(tuple[Probe, ...], probes, where="doctor")


def code_digest() -> str:
    """Return a digest of equivcheck's source and data files.

    The table of known issues by torch version is left out, because equivcheck itself measures the table.
    """
    package = Path(equivcheck.__path__[0])
    folders = (package, package / "strategies")  # a link in a checkout, which is not followed
    paths = {path for folder in folders for kind in ("py", "toml", "json") for path in folder.rglob(f"*.{kind}")}
    digest = hashlib.sha256()
    for path in sorted(paths - {table_path()}):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def shows_of(matrix: Matrix) -> Mapping[str, Mapping[str, Showing]]:
    """Return each known issue's script results by torch version."""
    return {issue: {version: found.scripts[issue] for version, found in matrix.versions.items()} for issue in matrix.issues}
